"""Pictures of gtop and of the web page for the documentation, from a scripted load.

    python -m tools.pictures record    run the load on a temporary scheduler and keep what the views ask it (a minute)
    python -m tools.pictures           draw the pictures of what was kept, light and dark

What was kept is in docs/images/scene.json, so that pictures change only when a view does; `pictures.json` beside it
says of which views the pictures are, and a test compares. The page is photographed only if it has changed, which
needs Chromium and playwright (the extra `browser`).
Every user of the load is the one who records it; in the pictures that one is called alice.
"""

from __future__ import annotations

import asyncio
import html
import json
import os
import pwd
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from shutil import which
from typing import Any
from unittest.mock import patch

from aiohttp import web

from gpusched.addons.top.frame import frame
from gpusched.addons.top.state import TopState
from gpusched.addons.web import pages, text
from gpusched.addons.web.app import FILES, Viewing
from gpusched.addons.web.reports import Reports
from gpusched.client import DaemonConnection

IMAGES = Path(__file__).parent.parent / "docs" / "images"
SCENE, MADE = IMAGES / "scene.json", IMAGES / "pictures.json"
PERSON = "alice"
COLUMNS, LINES = 110, 21
PAGE_WIDTH, PAGE_HEIGHT = 1180, 690
THEMES = ("light", "dark")
_BOARD = "/v1/board?fold_alike=1&limit=100"
_OVERVIEW = "/v1/board?filter=user%3Ame&limit=20&fold_alike=1"
_WHY_ROW = 2
"""Row under gtop's cursor."""
_BUSY = {"1": (0.97, 71, 68, 391), "2": (0.03, 4, 41, 63)}
_FOREIGN = {"pid": 4711, "vram": "18GiB", "user": "carl", "name": "python"}
"""Use, GiB, degrees and watts of the cards that the first two jobs hold, and who is on a card without a job."""
_TRAIN = 'i=5780; while :; do i=$((i+1)); echo "$i/9000 epoch $((i/100)) of 90" > "$GPUSCHED_PROGRESS"; sleep 1; done'
_ROUNDS = 50
"""Seconds until the scheduler plans by the progress that the job reports."""
_LOAD: tuple[tuple[str, ...], ...] = (
    ("-g", "2", "-t", "12h", "--name", "train", "--wrap", _TRAIN),
    ("-g", "1", "-t", "3h", "--name", "notebook", "--wrap", "sleep 600"),
    ("-g", "1", "-t", "40m", "--name", "eval", "--wrap", "sleep 600"),
    ("-g", "4", "-t", "2h", "--name", "wide", "--wrap", "sleep 600"),
    ("-g", "1", "-t", "30m", "--name", "sweep", "-a", "0-39", "--wrap", "sleep 600"),
    *[("-g", "1", "-t", "20m", "--name", "tune", "--wrap", "sleep 600")] * 6,
    ("-g", "1", "--name", "report", "--hold", "--wrap", "sleep 600"),
)
_TYPED = (
    "gsub -g 2 -t 1h --name train --wrap 'sleep 3600'",
    "gsub -g 2 -t 30m --name eval --wrap 'sleep 600'",
    "gq",
    "gq --why 2",
    "gcancel 1",
    "gq",
)
"""What the recording shows, typed on a fresh scheduler with two GPUs."""
_SECONDS = 30
NO_BREAK = "\N{NO-BREAK SPACE}"
"""Viewers of SVG make one of several other spaces."""


# --- recording ------------------------------------------------------------------------------------


def record() -> None:
    """Run the load and the typed commands, and keep the answers."""
    scene: dict[str, Any] = {}
    path = Path(tempfile.gettempdir(), f"gpus-{os.getpid()}.json")
    path.write_text(json.dumps({"gpus": _cards({})}))
    with _scheduler(str(path)) as (run, socket):
        for words in _LOAD[:2]:
            assert "Submitted" in run("gsub", *words)
        gpus = {job: json.loads(run("gshow", "--json", job))["jobs"][0]["gpus"] for job in _BUSY}
        path.write_text(json.dumps({"gpus": _cards(gpus)}))
        time.sleep(3.0)
        for words in _LOAD[2:]:
            assert "Submitted" in run("gsub", *words)
        with closing(DaemonConnection(socket)) as client:
            for _ in range(_ROUNDS):
                board = client.call("GET", _BOARD)
                client.call("GET", _OVERVIEW)
                time.sleep(1.0)
            rows = board["lists"]["rows"]["set"]
            scene["board"], scene["overview"] = board, client.call("GET", _OVERVIEW)
            scene["why"] = client.call("GET", f"/v1/jobs/{rows[_WHY_ROW]['id']}/why")["why"]
    path.unlink()
    with _scheduler("2x80GiB") as (run, _):
        scene["typed"] = [(line, run("sh", "-c", line)) for line in _TYPED]
    for name in ("board", "overview"):
        # It warns that the GPUs are simulated, which the text beside the pictures says.
        scene[name]["parts"]["daemon"]["warnings"] = []
    user = pwd.getpwuid(os.getuid()).pw_name
    kept = json.dumps(scene, indent=1).replace(json.dumps(user), json.dumps(PERSON))
    SCENE.write_text(re.sub(rf"\b{re.escape(user)}\b", PERSON, kept).replace(os.uname().nodename, "lab1") + "\n")


def _cards(held: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Four cards as a file describes them, in use once jobs hold them."""
    idle = {"name": "A100", "vram": "80GiB", "power_limit_w": 400, "power_min_w": 100}
    cards: list[dict[str, Any]] = [dict(idle) for _ in range(4)]
    for job, gpus in held.items():
        use, used_gib, temperature_c, power_w = _BUSY[job]
        for number, gpu in enumerate(gpus):
            cards[gpu["index"]] |= {
                "utilisation": use - 0.02 * number,
                "temperature_c": temperature_c + number,
                "power_w": power_w - 3 * number,
                "processes": [{"job": int(job), "vram": f"{used_gib - number}GiB"}],
            }
    for card in cards if held else ():
        if "processes" not in card:
            card |= {"utilisation": 0.31, "temperature_c": 52, "power_w": 160, "processes": [_FOREIGN]}
    return cards


@contextmanager
def _scheduler(gpus: str) -> Iterator[tuple[Any, str]]:
    """A scheduler in a folder of its own, and a function that types a command there and returns its output."""
    with tempfile.TemporaryDirectory(prefix="gpusched-") as home:
        env = {key: value for key, value in os.environ.items() if not key.startswith(("GPUSCHED_", "GSUB_"))}
        env |= {"GPUSCHED_HOME": home, "GPUSCHED_FAKE_GPUS": gpus, "COLUMNS": "90", "TZ": "UTC"}
        env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
        Path(home, "config.toml").write_text('[node]\nname = "lab1"\ncpus = 64\n')

        def run(*words: str) -> str:
            done = subprocess.run(words, env=env, cwd=home, capture_output=True, text=True, timeout=60, check=False)
            return (done.stdout + done.stderr).replace(home, "/home/alice")

        try:
            yield run, str(Path(home, "run", "api.sock"))
        finally:
            run("gcancel", "--all", "--yes")
            run("gwait", "--timeout", "30", "@")
            run("gpusched", "daemon", "stop")
            time.sleep(1.0)


def scene() -> dict[str, Any]:
    """What was kept."""
    return dict(json.loads(SCENE.read_text()))


# --- gtop -----------------------------------------------------------------------------------------


def gtop_lines(kept: Mapping[str, Any]) -> list[list[tuple[str, str]]]:
    """The frame of gtop at the scene."""
    found = TopState()
    found.take(kept["board"], found.view)
    found.cursor = _WHY_ROW
    found.cursor_id = kept["board"]["lists"]["rows"]["set"][_WHY_ROW]["id"]
    found.why = kept["why"]
    return frame(found, COLUMNS, LINES)


_COLORS = {
    "light": {
        "back": "#ffffff",
        "": "#18212b",
        "good": "#0b5fa5",
        "warn": "#b35000",
        "dim": "#5c6875",
        "on": "#ffffff",
    },
    "dark": {"back": "#12171d", "": "#e4eaf0", "good": "#4da3ff", "warn": "#ff9f43", "dim": "#95a3b1", "on": "#12171d"},
}
_AS = {"head": "dim", "full": "good"}
_BOLD = frozenset({"title", "warn", "key", "mark", "ask", "card", "full"})
_CELL, _LINE, _TOP, _LEFT = 8.4, 18, 34, 14
_FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"


def gtop_svg(lines: Sequence[Sequence[tuple[str, str]]], theme: str) -> str:
    """A terminal with the frame."""
    colors = _COLORS[theme]
    parts: list[str] = []
    for number, line in enumerate(lines):
        x, y = 0, _TOP + number * _LINE
        for piece, style in line:
            words, is_cursor = style.removeprefix("cursor"), style.startswith("cursor") or style == "ask"
            kind = words.strip() or ("" if style != "ask" else "ask")
            width = len(piece)
            if is_cursor:
                parts.append(
                    f'<rect x="{_LEFT + x * _CELL:.1f}" y="{y - 13}" width="{width * _CELL:.1f}" height="{_LINE}" '
                    f'fill="{colors[""]}"/>'
                )
            fill = colors["on"] if is_cursor else colors.get(_AS.get(kind, kind), colors[""])
            if piece.strip():
                parts.append(_text(piece, x, y, fill, kind in _BOLD))
            x += width
    return _terminal("gtop", "".join(parts), len(lines), theme)


def _text(piece: str, x: int, y: float, fill: str, is_bold: bool) -> str:
    lead = len(piece) - len(piece.lstrip(" "))
    shown = piece.strip(" ")
    weight = ' font-weight="700"' if is_bold else ""
    length = len(shown) * _CELL
    return (
        f'<text x="{_LEFT + (x + lead) * _CELL:.1f}" y="{y}" fill="{fill}"{weight} textLength="{length:.1f}" '
        f'lengthAdjust="spacingAndGlyphs">{html.escape(shown).replace(" ", NO_BREAK)}</text>'
    )


def _terminal(title: str, content: str, lines: int, theme: str, columns: int = COLUMNS, style: str = "") -> str:
    colors = _COLORS[theme]
    width, height = columns * _CELL + 2 * _LEFT, _TOP + lines * _LINE + 4
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
        f'height="{height}" font-family="{_FONT}" font-size="14" role="img">\n'
        f"<title>{html.escape(title)}</title>{style}"
        f'<rect width="100%" height="100%" rx="8" fill="{colors["back"]}" stroke="{colors["dim"]}"/>\n'
        f"{content}\n</svg>\n"
    )


# --- the recording --------------------------------------------------------------------------------


def recording_svg(typed: Sequence[Sequence[str]], theme: str) -> str:
    """The typed commands one below the other, as time goes by; then again from the start."""
    colors, rows, steps = _COLORS[theme], 0, []
    for command, output in typed:
        lines = [("$ " + command, True), *((line, False) for line in output.rstrip("\n").split("\n"))]
        steps.append((rows, lines))
        rows += len(lines) + 1
    share = 88.0 / len(steps)
    rules, parts = [], []
    for number, (first, lines) in enumerate(steps):
        begin = number * share
        rules.append(
            f"@keyframes s{number}{{0%,{begin:.1f}%{{opacity:0}}{begin + 0.1:.1f}%,100%{{opacity:1}}}}"
            f".s{number}{{animation:s{number} {_SECONDS}s step-end infinite}}"
        )
        rules.append(
            f"@keyframes o{number}{{0%,{begin + share / 3:.1f}%{{opacity:0}}"
            f"{begin + share / 3 + 0.1:.1f}%,100%{{opacity:1}}}}"
            f".o{number}{{animation:o{number} {_SECONDS}s step-end infinite}}"
        )
        for at, (line, is_command) in enumerate(lines):
            kind = "s" if is_command else "o"
            drawn = _text(line, 0, _TOP + (first + at) * _LINE, colors["good" if is_command else ""], is_command)
            parts.append(f'<g class="{kind}{number}">{drawn}</g>' if line.strip() else "")
    still = "@media(prefers-reduced-motion:reduce){g{animation:none!important}}"
    style = f"<style>{''.join(rules)}{still}</style>"
    columns = max(len(line) for _, lines in steps for line, _ in lines) + 1
    return _terminal("submit, why, cancel", "\n".join(parts), rows, theme, columns, style)


# --- the page -------------------------------------------------------------------------------------


class _Scene(Viewing):
    """The overview of a signed-in user, answered from what was kept."""

    def __init__(self, kept: Mapping[str, Any]) -> None:
        self.kept, self.html = kept, ""

    async def get(self, path: str, **query: Any) -> dict[str, Any]:
        assert path == "/v1/board", path
        return dict(self.kept["overview"])

    @property
    def reports(self) -> Reports:
        return Reports()

    async def page(self, template: str, **values: Any) -> web.Response:
        menu = {"user": PERSON, "has_reports": False, "may_control": False, "form_token": "", "path": "/"}
        self.html = text.environment().get_template(template).render(static=lambda name: name, **menu, **values)
        return web.Response()


def page_html(kept: Mapping[str, Any]) -> str:
    """The overview at the scene, with its style inside."""
    now = kept["overview"]["now"]

    class Then(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime.fromtimestamp(now, tz)

    viewing = _Scene(kept)
    with patch.object(text, "datetime", Then), patch("gpusched.addons.web.pages.time.time", lambda: now):
        asyncio.run(pages.overview(viewing))
    style = f"<style>{FILES['style.css'].decode()}</style>"
    body = re.sub(r"<script[^>]*></script>|<link rel=\"icon\"[^>]*>", "", viewing.html)
    return re.sub(r'<link rel="stylesheet"[^>]*>', lambda _: style, body)


def _photograph(content: str) -> None:
    from playwright.sync_api import sync_playwright

    chromium = which("chromium") or which("google-chrome")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for theme in THEMES:
            size = {"width": PAGE_WIDTH, "height": PAGE_HEIGHT}
            tab = browser.new_page(viewport=size, color_scheme=theme)
            tab.set_content(content)
            tab.screenshot(path=IMAGES / f"page-{theme}.png", scale="css")
        browser.close()


# --- all of it ------------------------------------------------------------------------------------


def digests(kept: Mapping[str, Any]) -> dict[str, str]:
    """What the pictures show, as one word each."""
    os.environ["TZ"] = "UTC"
    time.tzset()
    shown = {
        "gtop": json.dumps(gtop_lines(kept)),
        "page": page_html(kept),
        "recording": json.dumps(kept["typed"]),
    }
    return {name: sha256(content.encode()).hexdigest()[:16] for name, content in shown.items()}


def main(words: Sequence[str]) -> None:
    IMAGES.mkdir(exist_ok=True)
    if list(words) == ["record"]:
        record()
    kept, before = scene(), json.loads(MADE.read_text()) if MADE.exists() else {}
    made = digests(kept)
    for theme in THEMES:
        (IMAGES / f"gtop-{theme}.svg").write_text(gtop_svg(gtop_lines(kept), theme))
        (IMAGES / f"recording-{theme}.svg").write_text(recording_svg(kept["typed"], theme))
    if made["page"] != before.get("page"):
        _photograph(page_html(kept))
    MADE.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
