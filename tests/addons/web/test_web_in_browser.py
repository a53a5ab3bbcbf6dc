"""The web page in a headless Chromium: console, keyboard, refreshing, screenshots in dark, light and on a phone.

Skipped without Chromium or playwright (the extra `browser`). Screenshots go to GPUSCHED_TEST_SCREENSHOTS if set.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Daemon
from web_host import WebHost

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install '.[browser]'")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

SCREENS = {"light": (1280, 800), "dark": (1280, 800), "phone": (390, 844)}
ACCOUNTS = """[account.vision]
gpu_hours = 500
gpu_hours_per_user = 100
"""
REPORT = {
    "trace": "nov.swf",
    "notes": ["<b>3 rows</b> were left out"],
    "policies": [
        {
            "policy": policy,
            "jobs": 812,
            "wait_s": {"mean": wait_s, "median": wait_s / 3, "p95": wait_s * 4, "most": wait_s * 9},
            "slowdown": {"mean": wait_s / 900, "p95": wait_s / 100},
            "utilisation": 0.8,
        }
        for policy, wait_s in (("fair", 3600), ("throughput", 2100), ("fifo", 9000))
    ],
}
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    home = tmp_path_factory.mktemp("browser")
    found = Daemon(
        home, fake_gpus="4x80GiB", config='[daemon]\npoll_s = 0.2\n[node]\nname = "lab1"\ncpus = 64\n' + ACCOUNTS
    )
    found.start()
    yield found
    found.close()


@pytest.fixture
def host(daemon: Daemon) -> Iterator[WebHost]:
    reports = daemon.home / "reports"
    reports.mkdir(exist_ok=True)
    (reports / "nov.json").write_text(json.dumps(REPORT))
    found = WebHost(str(daemon.home / "run" / "api.sock"), allow=("control",), reports=str(reports))
    yield found
    found.close()


class Tab:
    """A tab that is signed in, and what went wrong in it."""

    def __init__(self, browser: Any, host: WebHost, daemon: Daemon, screen: str) -> None:
        width, height = SCREENS[screen]
        scheme = "dark" if screen == "dark" else "light"
        self.context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.page.on("console", lambda message: self.problems.append(f"{message.text} {message.location}"))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("dialog", lambda dialog: self.problems.append(dialog.message))
        self.address = f"http://127.0.0.1:{host.port}"
        self.page.goto(self.address)
        # By keyboard alone: the field has the focus.
        self.page.keyboard.type(daemon.call("POST", "/v1/web/code", {})["code"])
        self.page.keyboard.press("Enter")
        self.page.wait_for_selector(".cards", timeout=20_000)

    def close(self) -> None:
        self.context.close()


@pytest.mark.parametrize(
    "screen", ["light", *(pytest.param(screen, marks=pytest.mark.nightly) for screen in ("dark", "phone"))]
)
def test_pages_fit_the_screen_and_the_console_stays_clean(
    browser: Any, host: WebHost, daemon: Daemon, screen: str, tmp_path: Path
) -> None:
    script = "seq 20000; printf '\\033[31m<script>alert(2)</script>\\n'; sleep 1000"
    job = daemon.submit("/bin/sh", "-c", script, name=HOSTILE, gpus=2, stdout=str(tmp_path / "out.txt"))
    waiting = daemon.submit("/bin/true", name=HOSTILE, gpus=4)
    daemon.wait_state(job, "RUNNING")
    folder = Path(os.environ.get("GPUSCHED_TEST_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    tab = Tab(browser, host, daemon, screen)
    try:
        pages = {"overview": "/", "queue": "/queue", "job": f"/jobs/{job}", "why": f"/jobs/{waiting}"}
        pages |= {
            "timeline": "/timeline",
            "cards": "/cards?span=1h",
            "card": "/cards/lab1:0?span=1h",
            "people": "/people",
        }
        pages |= {"account": "/accounts/vision", "reports": "/reports", "report": "/reports/nov"}
        pages |= {"log": f"/jobs/{job}/log", "log-first": f"/jobs/{job}/log?page=1"}
        for name, path in pages.items():
            assert tab.page.goto(tab.address + path).status == 200, path
            tab.page.screenshot(path=folder / f"web-{name}-{screen}.png", full_page=True)
            wide = tab.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert wide <= 0, (name, wide)
        assert tab.problems == []
    finally:
        tab.close()
        daemon.call("POST", "/v1/jobs/cancel", {"ids": [job, waiting]})


@pytest.mark.nightly
def test_a_phone_shows_now_and_the_names_of_lanes_wherever_the_timeline_is(
    browser: Any, host: WebHost, daemon: Daemon
) -> None:
    tab = Tab(browser, host, daemon, "phone")
    try:
        tab.page.goto(tab.address + "/timeline")
        line = tab.page.locator(".now-line").bounding_box()
        assert 120 < line["x"] < SCREENS["phone"][0]
        name, lane = tab.page.locator(".gantt text:has-text('lab1:3')"), tab.page.locator(".rail").nth(3)
        for place in ("0", "one.scrollWidth"):
            tab.page.evaluate(f"one = document.querySelector('.gantt .scroll'); one.scrollLeft = {place}")
            text, rail = name.bounding_box(), lane.bounding_box()
            assert text["x"] >= 0
            assert text["x"] + text["width"] <= 132
            assert rail["y"] < text["y"] + text["height"] / 2 < rail["y"] + rail["height"]
        assert tab.problems == []
    finally:
        tab.close()


@pytest.mark.nightly
def test_an_open_page_keeps_its_focus_says_when_the_daemon_is_gone_and_goes_on(
    browser: Any, host: WebHost, daemon: Daemon
) -> None:
    tab = Tab(browser, host, daemon, "light")
    try:
        tab.page.goto(tab.address + "/queue")
        tab.page.focus("a[href='/queue?view=ended']")
        job = daemon.submit("/bin/true", name="appears", hold=True)
        tab.page.wait_for_selector("text=appears", timeout=30_000)
        assert tab.page.evaluate("document.activeElement.textContent") == "ended"
        assert tab.problems == []
        daemon.kill()
        tab.page.wait_for_selector("#away:not([hidden])", timeout=30_000)
        assert "has not answered since" in tab.page.inner_text("#away")
        assert "appears" in tab.page.inner_text("main")
        daemon.start()
        tab.page.wait_for_selector("#away[hidden]", state="attached", timeout=30_000)
        # As after a week: the session has ended, and the page leads to the form.
        daemon.call("POST", "/v1/web/session/end", {"everywhere": True})
        tab.page.wait_for_selector("#code", timeout=30_000)
        daemon.call("POST", "/v1/jobs/cancel", {"ids": [job]})
    finally:
        tab.close()
