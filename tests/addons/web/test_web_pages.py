"""The web page over a real daemon: headers, hosts, forms, sessions, and pages as they are sent."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest
from harness import Daemon
from support import wait_until
from web_host import Visitor, WebHost

from gpusched.addons.web.app import HEADERS, static_path
from gpusched.addons.web.drawing import plot

HOSTILE = "<img src=x onerror=alert(1)>\"'&{{7*7}}\u202eevil\u200b" + "n" * 100
BUDGET = "[account.vision]\ngpu_hours = 500\n"
PAGES = ("/", "/queue", "/timeline", "/cards", "/people")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    home = tmp_path_factory.mktemp("web")
    found = Daemon(
        home, fake_gpus="4x24GiB", config='[daemon]\npoll_s = 0.2\n[node]\nname = "lab1"\ncpus = 64\n' + BUDGET
    )
    found.start()
    yield found
    found.close()


@pytest.fixture(scope="module")
def host(daemon: Daemon) -> Iterator[WebHost]:
    found = WebHost(str(daemon.home / "run" / "api.sock"), allow=("control",))
    yield found
    found.close()


@pytest.fixture
def stranger(host: WebHost) -> Visitor:
    return Visitor(host)


@pytest.fixture
def visitor(host: WebHost, daemon: Daemon) -> Visitor:
    found = Visitor(host)
    assert found.sign_in(daemon).status == 303
    return found


# --- every answer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*PAGES, "/login", "/nowhere", "/jobs/999", "/static/x/y.js", static_path("live.js")])
def test_every_answer_has_the_headers_that_keep_browsers_safe(visitor: Visitor, path: str) -> None:
    answer = visitor.get(path)
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    is_file = answer.status == 200 and path.startswith("/static")
    assert answer.headers["Cache-Control"] == ("public, max-age=31536000, immutable" if is_file else "no-store")


def test_the_policy_admits_nothing_but_the_pages_own_files() -> None:
    policy = HEADERS["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "frame-ancestors 'none'" in policy


@pytest.mark.parametrize("name", ["evil.example", "127.0.0.1.evil.example", "lab1", "", "127.0.0.1:1:2", "[::1", "a@b"])
def test_a_foreign_host_is_refused(visitor: Visitor, name: str) -> None:
    assert visitor.get("/", Host=name).status in (400, 421)


@pytest.mark.parametrize("name", ["127.0.0.1:9", "localhost:8760", "[::1]:8760", "localhost"])
def test_a_tunnel_may_end_at_another_port(stranger: Visitor, name: str) -> None:
    assert stranger.get("/login", Host=name).status == 200


def test_long_answers_are_sent_with_gzip_to_who_takes_it(visitor: Visitor) -> None:
    for path in ("/queue", static_path("style.css")):
        whole, short = visitor.get(path), visitor.get(path, Accept_Encoding="gzip, br")
        assert (whole.headers["Content-Encoding"], short.headers["Content-Encoding"]) == (None, "gzip")
        assert whole.headers["Vary"] == short.headers["Vary"] == "Accept-Encoding"
        assert len(short.body) < len(whole.text) / 2
        assert len(gzip.decompress(short.body)) == pytest.approx(len(whole.text.encode()), abs=200)
    assert visitor.get("/jobs/0", Accept_Encoding="br").headers["Content-Encoding"] is None


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/queue"), ("DELETE", "/"), ("GET", "/logout"), ("PUT", "/login")]
)
def test_a_method_that_an_address_does_not_take_is_405(visitor: Visitor, method: str, path: str) -> None:
    answer = visitor.ask(method, path, None)
    assert (answer.status, answer.headers["Allow"]) == (405, "POST" if path == "/logout" else answer.headers["Allow"])
    assert "does not take that method" in answer.text
    assert answer.headers["Content-Security-Policy"]


def test_the_page_of_an_error_keeps_menu_and_user_and_leads_to_the_queue(visitor: Visitor) -> None:
    text = visitor.get("/jobs/99999").text
    assert '<a href="/queue">Queue</a> ·' in text
    assert "Sign out" in text
    assert visitor.get("/jobs/99999").form_token


def test_pages_name_the_servers_time_zone(visitor: Visitor) -> None:
    zone = datetime.now().astimezone().tzname()
    assert f"Times are those of the server: {zone}" in visitor.get("/timeline").text


# --- signing in -----------------------------------------------------------------------------------


def test_strangers_are_led_to_the_form_and_then_to_where_they_wanted(stranger: Visitor, daemon: Daemon) -> None:
    first = stranger.get("/queue?q=user:me")
    assert (first.status, first.headers["Location"]) == (303, "/login?next=%2Fqueue%3Fq%3Duser%3Ame")
    assert stranger.sign_in(daemon, "/queue?q=user:me").headers["Location"] == "/queue?q=user:me"
    assert stranger.get("/queue?q=user:me").status == 200


@pytest.mark.parametrize(
    "wanted", ["//evil.example", "/\\evil.example", "https://evil.example", "javascript:1", "/\r\nX: y"]
)
def test_signing_in_leads_nowhere_else(stranger: Visitor, daemon: Daemon, wanted: str) -> None:
    assert stranger.sign_in(daemon, wanted).headers["Location"] == "/"


def test_the_cookie_is_for_this_page_alone(stranger: Visitor, daemon: Daemon) -> None:
    answer = stranger.sign_in(daemon)
    (line,) = [one for one in answer.headers.get_all("Set-Cookie") if one.startswith("gpusched_session_")]
    name, _, rest = line.partition("=")
    assert name == stranger.cookie_name
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= {word.strip() for word in rest.split(";")}
    assert len(rest.partition(";")[0]) >= 43


@pytest.mark.parametrize("code", ["", "KD4F-7QXM", "x" * 5000, "<script>", "\0"])
def test_a_wrong_code_is_said_and_echoed_nowhere(stranger: Visitor, code: str) -> None:
    answer = stranger.send("/login", csrf=stranger.get("/login").form_token, code=code)
    assert answer.status in (400, 401)
    assert stranger.cookie_name not in stranger.cookies
    assert "<script>" not in answer.text
    assert not code or code not in answer.text.replace('placeholder="KD4F-7QXM"', "")


@pytest.mark.parametrize("path", ["/", "/jobs/1", "/api"])
@pytest.mark.parametrize("token", ["x", "é" * 43, "A" * 43, "A" * 5000])
def test_a_token_of_nobody_shows_nothing(stranger: Visitor, path: str, token: str) -> None:
    stranger.cookies[stranger.cookie_name] = token.encode().decode("latin-1")
    assert stranger.get(path).status in (303, 400, 401)


def test_the_script_hears_that_a_session_has_ended(visitor: Visitor, daemon: Daemon) -> None:
    daemon.call("POST", "/v1/web/session/end", {"everywhere": True})
    answer = visitor.get("/", Gpusched_Live="1")
    assert (answer.status, answer.text) == (401, "signed out")
    assert visitor.get("/").headers["Location"] == "/login"


def test_signing_out_ends_the_session_and_not_only_the_cookie(visitor: Visitor) -> None:
    token = visitor.cookies[visitor.cookie_name]
    assert visitor.send("/logout", csrf=visitor.get("/").form_token).headers["Location"] == "/login"
    assert visitor.cookie_name not in visitor.cookies
    visitor.cookies[visitor.cookie_name] = token
    assert visitor.get("/").status == 303


def test_no_token_is_in_an_address_or_page(visitor: Visitor) -> None:
    token = visitor.cookies[visitor.cookie_name]
    for path in PAGES:
        assert token not in visitor.get(path).text


# --- forms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": None},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
@pytest.mark.parametrize("path", ["/logout", "/login", "/jobs/1/cancel"])
def test_forms_of_other_sites_are_refused(visitor: Visitor, path: str, headers: dict[str, str | None]) -> None:
    token = visitor.get("/").form_token
    if path == "/login":
        token = visitor.get("/login").form_token
    assert visitor.send(path, headers, csrf=token, code="KD4F-7QXM").status == 403


@pytest.mark.parametrize("csrf", ["", "0" * 64, "é"])
def test_forms_without_their_proof_are_refused(visitor: Visitor, csrf: str) -> None:
    answer = visitor.send("/logout", csrf=csrf)
    assert (answer.status, "reload the page" in answer.text) == (403, True)
    assert visitor.get("/").status == 200


def test_proof_of_one_session_is_none_of_another(visitor: Visitor, host: WebHost, daemon: Daemon) -> None:
    other = Visitor(host)
    other.sign_in(daemon)
    assert visitor.send("/logout", csrf=other.get("/").form_token).status == 403


# --- actions --------------------------------------------------------------------------------------


def test_a_job_is_held_released_and_cancelled_from_its_page(visitor: Visitor, daemon: Daemon) -> None:
    job = daemon.submit("/bin/true", begin_at=4e9)
    page = visitor.get(f"/jobs/{job}")
    assert "gctl hold" in page.text
    for act, is_so in (
        ("hold", lambda: daemon.call("GET", f"/v1/jobs/{job}")["job"]["hold"] is not None),
        ("release", lambda: daemon.call("GET", f"/v1/jobs/{job}")["job"]["hold"] is None),
        ("cancel", lambda: daemon.state(job) == "CANCELLED"),
    ):
        answer = visitor.send(f"/jobs/{job}/{act}", csrf=page.form_token)
        assert (answer.status, answer.headers["Location"]) == (303, f"/jobs/{job}")
        wait_until(is_so, what=act)
    assert "Cancel job" not in visitor.get(f"/jobs/{job}").text


@pytest.mark.parametrize("job", ["all", "@", "1,2", "p1", "1_[0-9]", "%2e%2e"])
def test_an_action_is_about_one_job(visitor: Visitor, job: str) -> None:
    token = visitor.get("/").form_token
    assert visitor.send(f"/jobs/{job}/cancel", csrf=token).status == 404


def test_a_page_without_control_shows_no_actions_and_takes_none(daemon: Daemon) -> None:
    host = WebHost(str(daemon.home / "run" / "api.sock"))
    try:
        reader = Visitor(host)
        reader.sign_in(daemon)
        job = daemon.submit("/bin/true", hold=True)
        page = reader.get(f"/jobs/{job}")
        assert "Cancel" not in page.text
        assert reader.send(f"/jobs/{job}/cancel", csrf=page.form_token).status == 403
        assert daemon.state(job) == "PENDING"
    finally:
        host.close()


# --- what pages show ------------------------------------------------------------------------------


class Elements(HTMLParser):
    """Tags and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_a_jobs_words_are_text_wherever_they_are_shown(visitor: Visitor, daemon: Daemon, tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    script = "printf '</pre><script>alert(2)</script>\\033[31mred\\000\\n50%%\\r51%%\\n'"
    job = daemon.submit("/bin/sh", "-c", script, name=HOSTILE, comment=HOSTILE, stdout=str(out), gpus=1)
    daemon.wait(job)
    daemon.submit("/bin/sh", "-c", "sleep 1000", name=HOSTILE, gpus=1)
    for path in (*PAGES, f"/jobs/{job}", "/queue?view=ended", "/queue?q=" + "%3Cscript%3E%22", "/cards/lab1:0"):
        answer = visitor.get(path)
        text = answer.text
        assert answer.status == 200, path
        for tag, attributes in Elements(text).found:
            assert tag != "img" or str(attributes["src"]).startswith("data:image/png;base64,"), path
            assert not [name for name in attributes if name.startswith("on") or name == "style"], (path, tag)
            assert tag != "script" or attributes["src"] == static_path("live.js")
            assert not str(attributes.get("href", "")).lower().startswith(("javascript:", "http", "//"))
        for sign in ("\u202e", "\u200b", "\x1b", "\0"):
            assert sign not in text, path
    page = visitor.get(f"/jobs/{job}").text
    assert '&lt;/pre&gt;&lt;script&gt;alert(2)&lt;/script&gt;<span class="c1">red\\x00' in page
    assert "51%\n" in page
    assert "50%" not in page.partition('class="log"')[2].partition("</pre>")[0]


def test_templates_switch_escaping_off_nowhere() -> None:
    import gpusched.addons.web

    folder = Path(gpusched.addons.web.__file__).parent
    files = [*folder.rglob("*.html"), *folder.rglob("*.py")]
    assert len(files) > 15
    for file in files:
        text = file.read_text()
        assert not re.search(r"\|\s*safe\b|Markup\(|autoescape\s*(?:=\s*False|false)|innerHTML", text), file
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|eval\(|document\.write", (folder / "static" / "live.js").read_text()
    )


def test_pages_ask_no_other_host(visitor: Visitor) -> None:
    for path in PAGES:
        for tag, attributes in Elements(visitor.get(path).text).found:
            for name in ("src", "href", "action"):
                assert (attributes.get(name) or "/").startswith(("/", "?", "#", "data:image/png;")), (path, tag)


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/queue?q=colour:red", 200, "is not a filter key"),
        ("/queue?q=%22", 200, "is not closed by a quotation mark"),
        ("/queue?page=0", 200, "page 1 of"),
        ("/queue?page=-1", 200, "page 1 of"),
        ("/queue?page=99999", 200, "No jobs."),
        ("/queue?view=everything", 400, "there is no such list"),
        ("/cards?span=1m", 400, "there is no such span"),
        ("/cards/lab1:99", 404, "there is no GPU"),
        ("/cards/..%2f..%2fetc", 404, "there is no such"),
        ("/timeline?from=abc", 400, "is not a span of time"),
        ("/timeline?from=-999d", 400, "is not a span of time"),
        ("/jobs/0", 400, "is not a job id"),
        ("/jobs/1;x", 404, "there is no such job"),
        ("/jobs/99999999999999999999", 404, "there is no such job"),
        ("/accounts/nobody-knows", 404, "nobody-knows"),
        ("/static/0000000000000000/live.js", 404, "there is no such file"),
    ],
)
def test_wrong_addresses_are_answered_with_a_sentence(visitor: Visitor, path: str, status: int, text: str) -> None:
    answer = visitor.get(path)
    assert (answer.status, text in answer.text) == (status, True), answer.text[-900:]


def test_a_page_that_has_not_changed_is_not_sent_again(visitor: Visitor) -> None:
    tag = visitor.get("/accounts/root").headers["ETag"] or visitor.get("/login").headers["ETag"]
    assert tag
    first = visitor.get("/login")
    assert visitor.get("/login", If_None_Match=first.headers["ETag"]).status == 304


def test_a_daemon_that_is_gone_is_said_and_comes_back(visitor: Visitor, daemon: Daemon) -> None:
    daemon.kill()
    answer = visitor.get("/")
    assert (answer.status, answer.headers["Refresh"]) == (503, "5")
    assert re.search(r"The scheduler has not answered since \d\d:\d\d", answer.text)
    daemon.start()
    assert visitor.get("/").status == 200


# --- folding, progress, arrays ----------------------------------------------------------------------


def test_equal_jobs_have_one_row_that_opens(visitor: Visitor, daemon: Daemon) -> None:
    busy = daemon.submit("/bin/sleep", "1000", gpus=4, cpus=1)
    # The first in line may wait for resources, and so for another reason than those behind it.
    first = daemon.submit("/bin/true", name="first", gpus=4)
    jobs = [daemon.submit("/bin/true", name="alike", gpus=4) for _ in range(3)]
    ranges = f"{jobs[0]}-{jobs[-1]}"
    wait_until(lambda: ranges in visitor.get("/queue").text, what="a fold")
    text = visitor.get("/queue?q=alike").text
    (link,) = re.findall(r'href="([^"]*unfold=\d+)#', text)
    assert ("3 jobs" in text, text.count("<tr>")) == (True, 2)
    opened = visitor.get(link.replace("&amp;", "&")).text
    assert all(f'id="j{job}"' in opened for job in jobs)
    assert f'class="count" id="u{jobs[0]}" href="/queue?q=alike&amp;view=active&amp;page=1&amp;unfold=#' in opened
    # The place in line; what it means is on the job's page.
    wait_until(lambda: re.search(r"</a>, \d+(st|nd|rd|th)</td>", visitor.get("/queue").text), what="a forecast")
    assert f'<a href="/jobs/{jobs[0]}#why">' in visitor.get("/queue").text
    assert "needs 4 GPUs" not in visitor.get("/queue").text
    assert "needs 4 GPUs" in visitor.get(f"/jobs/{jobs[0]}").text
    daemon.call("POST", "/v1/jobs/cancel", {"ids": [busy, first, *jobs]})


def test_progress_is_a_bar_with_what_is_left(visitor: Visitor, daemon: Daemon, tmp_path: Path) -> None:
    script = "printf ' 45%%|####      | 45/100 [00:45<10:00, 1.0it/s]'; sleep 1000"
    job = daemon.submit("/bin/sh", "-c", script, name="bar", stdout=str(tmp_path / "out.txt"))
    for path in ("/", "/queue", f"/jobs/{job}"):
        wait_until(lambda path=path: "done 45%" in visitor.get(path).text, what=f"progress on {path}")
        assert re.search(r"45% · (10:00|9:\d\d) left", visitor.get(path).text), path
    daemon.call("POST", "/v1/jobs/cancel", {"ids": [job]})


def test_the_page_of_an_array_lists_its_tasks_the_failed_ones_first(visitor: Visitor, daemon: Daemon) -> None:
    script = "case $GPUSCHED_ARRAY_TASK_ID in 1) exit 3;; 2) sleep 1000;; esac"
    array = daemon.submit("/bin/sh", "-c", script, name="sweep", array="0-4%2")
    wait_until(
        lambda: all(word in visitor.get(f"/jobs/{array}").text for word in ("3 completed", "1 failed")), what="tasks"
    )
    text = visitor.get(f"/jobs/{array}").text
    table = text.partition('id="tasks"')[2]
    shown = re.findall(rf'<a href="/jobs/({array}_\d)">', table)
    assert (shown[:2], sorted(shown)) == ([f"{array}_1", f"{array}_2"], [f"{array}_{task}" for task in range(5)])
    assert f'<a href="/jobs/{array}_1/log">output</a>' in table
    assert re.findall(r'<path class="(\w+)" d="((?:M[0-9 ]+h10v10h-10z)+)"><title>', text)
    # The same state on the page and in the queue.
    wait_until(lambda: f'id="j{array}"' in visitor.get("/queue").text, what="a round")
    (row,) = re.findall(rf'<a id="j{array}".*?</tr>', visitor.get("/queue").text, re.S)
    for place in (row, text.partition("</h1>")[0]):
        assert '<span class="state running">RUNNING</span>' in place
    daemon.call("POST", "/v1/jobs/cancel", {"ids": [array]})


def test_ended_jobs_say_how_they_ended_and_wait_no_longer(visitor: Visitor, daemon: Daemon) -> None:
    job = daemon.submit("/bin/true", name="given-up", hold=True)
    daemon.call("POST", "/v1/jobs/cancel", {"ids": [job]})
    wait_until(lambda: "given-up" in visitor.get("/queue?view=ended").text, what="a round")
    text = visitor.get("/queue?view=ended").text
    assert '<th scope="col">How it ended</th>' in text
    (row,) = re.findall(rf'<a id="j{job}".*?</tr>', text, re.S)
    assert '<td class="n"><span class="dim">-</span></td>' in row


def test_queues_and_totals_count_each_task_of_an_array(visitor: Visitor, daemon: Daemon) -> None:
    array = daemon.submit("/bin/true", name="many", array="0-6", hold=True)
    try:
        (row,) = (one for one in daemon.call("GET", "/v1/queues")["queues"] if one["is_default"])
        assert row["pending"] >= 7
        wait_until(lambda: f"<b>{row['pending']}</b> pending" in visitor.get("/people").text, what="a round")
        assert "Each task of an array counts as one job." in visitor.get("/people").text
    finally:
        daemon.call("POST", "/v1/jobs/cancel", {"ids": [array]})


# --- timeline -------------------------------------------------------------------------------------


def test_the_timeline_draws_what_has_no_end_and_what_was_short(visitor: Visitor, daemon: Daemon) -> None:
    brief = daemon.submit("/bin/true", name="brief", gpus=1)
    daemon.wait(brief)
    limited = daemon.submit("/bin/sleep", "1000", name="limited", gpus=1, time_limit_s=7200)
    endless = daemon.submit("/bin/sleep", "1000", name="endless", gpus=1)
    for job in (limited, endless):
        daemon.wait_state(job, "RUNNING")
    wait_until(lambda: f"job {endless} has no time limit" in visitor.get("/timeline").text, what="a round")
    text = visitor.get("/timeline").text
    shapes = re.findall(r'<a href="/jobs/(\d+)"><g class="shape"><title>([^<]*)</title><rect class="(\w+)"', text)
    kinds = {(job, kind) for job, _, kind in shapes}
    assert {(brief, "past"), (limited, "now"), (limited, "ends"), (endless, "now"), (endless, "open")} <= kinds
    (title,) = {title for job, title, _ in shapes if job == brief}
    assert re.fullmatch(rf"job {brief} brief of \w+: 0:0\d", title)
    # Only the one with a limit is left, also of those that other tests let run.
    others = [job for (job,) in daemon.call("GET", "/v1/jobs?fields=id")["rows"] if job != limited]
    daemon.call("POST", "/v1/jobs/cancel", {"ids": others})
    waiting = [daemon.submit("/bin/true", name="next", gpus=4, time_limit_s=60) for _ in range(3)]
    # Equal jobs have one lane; its name is beside what scrolls.
    lane = re.compile(rf'</title>{waiting[1]}-{waiting[2]} next</text></a>.*<div class="scroll"', re.S)
    wait_until(lambda: lane.search(visitor.get("/timeline").text) is not None, what="a forecast")
    daemon.call("POST", "/v1/jobs/cancel", {"ids": [limited, *waiting]})


def test_single_values_are_dots_and_curves_say_what_they_are_means_of() -> None:
    made = plot("GPU use", [None, 5.0, None, 1.0, 2.0], 0.0, 300.0, unit="%", limit=100)
    assert made is not None
    assert (len(made.lines), [x for x, _ in made.dots], made.step_s) == (1, ["160.0"], 300.0)


# --- sums and pictures ----------------------------------------------------------------------------


def test_the_use_of_all_cards_is_one_picture_without_a_script(visitor: Visitor) -> None:
    wait_until(lambda: "data:image/png;base64," in visitor.get("/cards?span=1h").text, what="a minute's reading")
    text = visitor.get("/cards?span=1h").text
    assert '<image href="data:image/png;base64,iVBOR' in text
    assert "GPU use of 4 cards" in text


def test_a_curve_of_memory_has_its_booking_as_a_line(visitor: Visitor, daemon: Daemon) -> None:
    whole = daemon.submit("/bin/sleep", "1000", gpus=1)
    part = daemon.submit("/bin/sleep", "1000", gpus=1, vram_mib=6144)
    for job, top in ((whole, "40 GiB"), (part, "8 GiB")):
        wait_until(lambda job=job: "GPU memory" in visitor.get(f"/jobs/{job}").text, what="readings")
        (figure,) = re.findall(r"<figcaption>GPU memory.*?</figure>", visitor.get(f"/jobs/{job}").text, re.S)
        assert 'class="limit"' in figure
        assert f">{top}</text>" in figure
    daemon.call("POST", "/v1/jobs/cancel", {"ids": [whole, part]})


def test_an_accounts_page_has_its_budget_and_its_months(visitor: Visitor, daemon: Daemon) -> None:
    text = visitor.get("/accounts/vision").text
    assert re.search(r"<td>all</td><td>\w+ \d{4}</td><td class=\"n\">500.00</td>", text), text
    assert "/accounts/vision" in visitor.get("/people").text
    (before,) = re.findall(r'href="\?month=(\d{4}-\d\d)"', text)
    page = visitor.get(f"/accounts/vision?month={before}")
    assert page.status == 200
    assert len(re.findall(r'href="\?month=', page.text)) == 2
    for month in ("2026-13", "x", "2999-01", "<script>"):
        answer = visitor.get(f"/accounts/vision?month={month}")
        assert answer.status in (400, 409), month
        assert "<script>alert" not in answer.text


# --- reports --------------------------------------------------------------------------------------


def test_reports_are_for_who_is_signed_in_and_hostile_ones_are_text(daemon: Daemon, tmp_path: Path) -> None:
    policy = {"policy": HOSTILE, "jobs": 7, "users": [{"name": "ann"}]}
    (tmp_path / "nov.json").write_text(json.dumps({"trace": HOSTILE, "notes": [HOSTILE], "policies": [policy]}))
    host = WebHost(str(daemon.home / "run" / "api.sock"), reports=str(tmp_path))
    try:
        one = Visitor(host)
        one.cookies[one.cookie_name] = "A" * 43
        for path in ("/reports", "/reports/nov", "/reports/none"):
            assert one.get(path).headers["Location"].startswith("/login"), path
        one.sign_in(daemon)
        assert 'href="/reports/nov"' in one.get("/reports").text
        assert 'href="/reports"' in one.get("/").text
        text = one.get("/reports/nov").text
        assert ("<td>jobs</td>" in text, "<img src=x" in text, "ann" in text) == (True, False, False)
        for path in ("/reports/none", "/reports/..%2fnov", "/reports/%2e%2e"):
            assert one.get(path).status == 404, path
    finally:
        host.close()


def test_without_a_folder_there_are_no_reports(visitor: Visitor) -> None:
    assert visitor.get("/reports").status == 404
    assert visitor.get("/reports/x").status == 404
    assert "/reports" not in visitor.get("/").text


# --- whole logs -----------------------------------------------------------------------------------


def test_a_log_is_read_page_by_page_and_its_end_is_followed(visitor: Visitor, daemon: Daemon, tmp_path: Path) -> None:
    out, go = tmp_path / "out.txt", tmp_path / "go"
    script = f"seq -f 'line %.0f' 20000; printf '\\033[31mred<b>\\n'; until [ -e {go} ]; do sleep 0.1; done; echo over"
    job = daemon.submit("/bin/sh", "-c", script, stdout=str(out))
    wait_until(lambda: out.exists() and out.read_bytes().endswith(b"<b>\n"), what="output")
    end = visitor.get(f"/jobs/{job}/log")
    assert "page 4 of 4" in end.text
    assert 'data-live="2"' in end.text
    assert '<span class="c1">red&lt;b&gt;' in end.text
    assert "\x1b" not in end.text
    shown = ""
    for page in range(1, 5):
        answer = visitor.get(f"/jobs/{job}/log?run=1&page={page}")
        assert (answer.status, 'data-live="0"' in answer.text) == (200, True)
        shown += re.search(r"<pre[^>]*>(.*)</pre>", answer.text, re.S)[1]  # type: ignore[index]
    lines = shown.splitlines()
    assert lines[:20000] == [f"line {number}" for number in range(1, 20001)]
    go.touch()
    daemon.wait(job)
    ended = visitor.get(f"/jobs/{job}/log")
    assert "over\n</span></pre>" in ended.text
    assert 'data-live="0"' in ended.text
    assert f"/jobs/{job}/log?run=1" in visitor.get(f"/jobs/{job}").text


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("run=9", 404),
        ("page=9", 404),
        ("page=0", 400),
        ("file=3", 400),
        ("run=x", 400),
        ("page=1e3", 400),
        ("err=1", 200),
    ],
)
def test_a_log_that_is_not_there_is_said(visitor: Visitor, daemon: Daemon, query: str, status: int) -> None:
    job = daemon.submit("/bin/echo", "x", stdout=str(daemon.home / "x.txt"))
    daemon.wait(job)
    assert visitor.get(f"/jobs/{job}/log?{query}").status == status


def test_errors_have_a_page_of_their_own_where_they_have_a_file(visitor: Visitor, daemon: Daemon) -> None:
    script = "echo to-out; echo to-err >&2"
    both = daemon.submit("/bin/sh", "-c", script, stdout=str(daemon.home / "o"), stderr=str(daemon.home / "e"))
    one = daemon.submit("/bin/sh", "-c", script, stdout=str(daemon.home / "oe"))
    for job in (both, one):
        daemon.wait(job)
    text = visitor.get(f"/jobs/{both}/log").text
    assert ("to-out" in text, "to-err" in text, f"/jobs/{both}/log?run=1&amp;err=1" in text) == (True, False, True)
    assert "to-err\n</pre>" in visitor.get(f"/jobs/{both}/log?err=1").text
    text = visitor.get(f"/jobs/{one}/log").text
    assert ("to-out\nto-err\n</pre>" in text, "err=1" in text) == (True, False)
