"""gq on a busy queue: one line a job, equal ones folded, the next to start first, a pager, a head that stays."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator

import pyte
import pytest
from screen import Screen
from shell import Shell, stopped
from support import wait_until
from test_terminals import on_terminal

from gpusched.cli import gq, tables


def is_running(sh: Shell, job_id: str) -> bool:
    return sh.ok("gq", "--noheader", "-o", "%T", "-j", job_id) == "RUNNING\n"


def plain(text: str) -> list[str]:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "").splitlines()


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A busy queue to look at, see `fill`."""
    root = tmp_path_factory.mktemp("busy")
    (root / "home").mkdir()
    (root / "home" / "config.toml").write_text('[node]\nname = "lab1"\ncpus = 8\nmem_mib = 65536\n')
    shell = Shell(root / "home", root, GPUSCHED_FAKE_GPUS="2x24GiB")
    shell.is_to_start = True
    fill(shell)
    yield shell
    stopped(shell)


@pytest.fixture
def busy_alone(own: Shell) -> Shell:
    """The same for a test that changes it."""
    fill(own)
    return own


def fill(own: Shell) -> None:
    """Both GPUs taken by job 1; 2-31 are equal and wait, 32 goes before them, 33 is held, 34 has a long name."""
    own.submit("-J", "wide", "-g", "2", "--", "sleep", "1000")
    own.type("gsub", "-J", "sweep", "-g", "1", "--batch", "-", stdin=b"true\n" * 30)
    own.submit("-J", "urgent", "-g", "1", "--nice", "-1000", "--", "true")
    own.submit("-J", "日本語", "-H", "--", "true")
    own.submit("-J", "a-name-" * 20, "-g", "1", "--", "true")
    wait_until(lambda: is_running(own, "1"), what="the first one to run")


def test_equal_pending_jobs_share_a_row_and_the_next_to_start_comes_first(busy: Shell) -> None:
    rows = [line.split() for line in busy.ok("gq", "--noheader").splitlines()]
    assert [(row[0], row[1][:7]) for row in rows] == [
        ("1", "wide"),
        ("32", "urgent"),
        ("2-31", "(30"),
        ("34", "a-name-"),
        ("33", "日本語"),
    ]
    assert [row[-1] for row in rows] == ["lab1:0,1", "(Resources)", "(Priority)", "(Priority)", "(JobHeldUser)"]


def test_scripts_get_one_row_per_job(busy: Shell) -> None:
    ids = [str(number) for number in range(1, 35)]
    assert len(busy.ok("gq", "--all-rows", "--noheader").splitlines()) == 34
    assert busy.ok("gq", "--quiet").split() == ids
    assert busy.ok("gq", "--noheader", "-o", "%i").split() == ids
    assert [job["id"] for job in json.loads(busy.ok("gq", "--json"))["jobs"]] == ids
    named = busy.ok("gq", "--noheader", "5", "4").splitlines()
    assert [line.split()[0] for line in named] == ["4", "5"]


def in_one_spelling(text: str) -> str:
    """A text with one number for each with a fraction: a small one may have zeros or an exponent."""
    return re.sub(r"\d+(\.\d+e|\.|e)-?\d+", "1.5", text)


@pytest.mark.parametrize("words", [("gq",), ("gq", "--sort", "-id"), ("gq", "5"), ("ghist",)])
def test_json_in_a_pipe_is_one_compact_ascii_line(busy: Shell, words: tuple[str, ...]) -> None:
    text = busy.ok(*words, "--json")
    found = json.loads(text)
    assert in_one_spelling(text) == in_one_spelling(json.dumps(found, separators=(",", ":"))) + "\n"
    assert text.startswith('{"schema_version":')
    names = {job["name"] for job in found["jobs"]}
    assert ("日本語" in names) == (words in (("gq",), ("gq", "--sort", "-id")))


def test_sorted_jobs_share_a_row_at_the_position_of_the_first(busy: Shell) -> None:
    rows = [line.split()[:3] for line in busy.ok("gq", "--noheader", "--sort", "-id").splitlines()]
    assert [row[0] for row in rows] == ["34", "33", "32", "2-31", "1"]
    assert rows[3] == ["2-31", "(30", "jobs)"]


def test_the_reason_is_a_word_and_the_sentence_is_in_long_and_json(busy: Shell) -> None:
    sentence = json.loads(busy.ok("gq", "--json", "32"))["jobs"][0]["reason_text"]
    assert "GPU" in sentence
    assert sentence not in busy.ok("gq", "32")
    assert f"(Resources) {sentence}" in busy.ok("gq", "--long", "32")


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_a_terminal_gets_one_line_per_row_and_a_summary(busy: Shell, columns: int) -> None:
    lines = plain(on_terminal(busy, "gq", COLUMNS=str(columns), TERM="xterm").out)
    assert lines[-2:] == ["", "1 running, 33 pending, 0 of 2 GPUs free"]
    assert len(lines) == 8
    assert max(map(len, lines)) <= columns
    assert "a-name-" * 20 in busy.ok("gq"), "a pipe gets whole names"
    assert "pending" not in busy.ok("gq"), "and rows alone"


def test_a_narrow_terminal_gets_shorter_cells_before_fewer_columns(busy: Shell) -> None:
    tables = {
        columns: plain(on_terminal(busy, "gq", COLUMNS=str(columns), TERM="xterm").out) for columns in (34, 40, 60, 80)
    }
    assert tables[80][0].split() == ["ID", "NAME", "USER", "ST", "TIME", "GPUS", "NODE/REASON"]
    assert "2-31 (30 jobs)" in tables[80][3]
    assert tables[60][0].split() == tables[80][0].split()
    assert tables[40][0].split()[:4] == ["ID", "NAME", "ST", "TIME"], "who and how many GPUs go first"
    assert "2-31 (30) " in tables[40][3]
    assert "(Priority)" in tables[40][3]
    assert tables[34][0].split()[:3] == ["ID", "NAME", "ST"]


def test_a_pending_job_shows_how_long_it_has_waited(own: Shell) -> None:
    job_id = own.submit("-H", "--", "true")
    wait_until(lambda: own.ok("gq", "--noheader").split()[4] != "0:00", what="a second of waiting")
    job = json.loads(own.ok("gq", "--json"))["jobs"][0]
    assert (job["id"], job["start_at"]) == (job_id, None)


@pytest.mark.parametrize("columns", [40, 80])
def test_sentences_of_long_are_below_their_jobs_at_a_terminal(busy: Shell, columns: int) -> None:
    lines = plain(on_terminal(busy, "gq", "--long", COLUMNS=str(columns), TERM="xterm").out)
    assert max(map(len, lines)) <= columns
    at = next(number for number, line in enumerate(lines) if line.startswith("32 "))
    assert lines[at].endswith("(Resources)")
    assert lines[at + 1].startswith("    needs 1 GPU, none of 2")
    assert not lines[at + 1].endswith(" ")


def test_progress_loses_its_bar_before_the_percentage() -> None:
    """At a terminal; the number of columns is what decides."""
    rows = [{"id": "1", "name": "a-long-name" * 2, "state": "RUNNING"}]
    columns = [
        tables.Column("NAME", lambda job: job["name"], least=6),
        gq._progress_column({"1": (0.45, 123.0)}, 0.0),
    ]
    for room, progress in ((60, "[####......]  45% 2:03"), (40, "45% 2:03"), (16, "45% 2:03")):
        kept, made = tables._narrowed(columns, rows, tables.rows_of(columns, rows), room)
        assert made[0][1].strip() == progress, room
        assert len(kept) == 2


@pytest.mark.parametrize("room", range(36, 120, 7))
def test_no_width_cuts_a_percentage(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "screen", lambda: (24, room))
    texts = dict.fromkeys(("submit_at", "start_at", "end_at", "suspended_at", "reason", "reason_text", "idle_at"))
    texts |= {"state": "RUNNING", "start_at": 0.0, "suspended_s": 0.0, "node": "lab1", "gpus": [], "gpu_request": "1"}
    rows = [{**texts, "id": "1924-2003 (80 jobs)", "name": "train1", "user": "root"}]
    columns = [
        gq._id_column({rows[0]["id"]: rows[0]["id"]}),
        *gq._columns(3723.0, is_long=False),
        gq._progress_column({rows[0]["id"]: (1.0, 3723.0)}, 3723.0),
    ]
    assert "100% 0:00" in "\n".join(tables.lines_of(columns, rows))


def test_empty_queue_says_so_at_a_terminal(own: Shell) -> None:
    own.ok("gq")
    wait_until(lambda: "2 of 2" in on_terminal(own, "gq").out, what="the GPUs to be read")
    assert plain(on_terminal(own, "gq").out) == ["no jobs, 2 of 2 GPUs free"]


def test_only_a_terminal_uses_the_pager_for_many_rows(busy: Shell) -> None:
    env = {"LINES": "20", "TERM": "xterm", "GPUSCHED_PAGER": "sed 's/^/paged: /'", "PAGER": "false"}
    paged = plain(on_terminal(busy, "gq", "--all-rows", **env).out)
    assert len(paged) == 37
    assert all(line.startswith("paged: ") for line in paged)
    for words in (["--all-rows", "--no-pager"], []):
        assert "paged: " not in on_terminal(busy, "gq", *words, **env).out
    assert "paged: " not in busy.ok("gq", "--all-rows", **env)
    for pager in ("no-such-pager", "cat", ""):
        shown = on_terminal(busy, "gq", "--all-rows", **{**env, "GPUSCHED_PAGER": pager}).out
        assert "1 running, 33 pending" in shown, pager
    gone = on_terminal(busy, "gq", "--all-rows", **{**env, "GPUSCHED_PAGER": "head -n 1"})
    assert (gone.code, len(plain(gone.out))) == (0, 1), "who leaves the pager early is no error"


def test_watch_keeps_its_header_and_fits_the_terminal(busy: Shell) -> None:
    drawn = pyte.Screen(90, 12)
    with Screen(busy, "gq", "-w", "--all-rows", size=(12, 90), TERM="xterm", COLUMNS="", LINES="") as screen:
        frames = []
        stream = pyte.Stream(drawn)
        for _ in range(2):
            stream.feed(screen.see("all of them: gq"))
            frames.append([line.rstrip() for line in drawn.display])
        screen.process.send_signal(signal.SIGINT)
        assert screen.end() == 0
    for lines in frames:
        assert re.fullmatch(r"\d\d:\d\d:\d\d  1 running, 33 pending, 0 of 2 GPUs free", lines[0])
        assert lines[2].split()[:2] == ["ID", "NAME"]
        assert re.fullmatch(r"and \d+ more lines; all of them: gq", [line for line in lines if line][-1])
    before, after = ([re.sub(r"\d+:\d\d", "M:SS", line) for line in lines[4:]] for lines in frames)
    assert before == after, "each frame covers the one before"


def test_watch_with_json_prints_one_document_per_line(busy: Shell) -> None:
    watching = subprocess.Popen(
        busy.argv("gq", "-w", "--json", "-j", "33"), env=busy.env, cwd=busy.work, stdout=subprocess.PIPE
    )
    assert watching.stdout is not None
    try:
        documents = [json.loads(watching.stdout.readline()) for _ in range(2)]
    finally:
        watching.kill()
        watching.wait()
        watching.stdout.close()
    assert [[job["id"] for job in document["jobs"]] for document in documents] == [["33"], ["33"]]
    assert documents[0]["schema_version"] == 1


def test_columns_of_slurm_formats_count_cells(busy: Shell) -> None:
    assert busy.ok("gq", "--noheader", "-o", "%8j|%.8j|%5j|", "33") == "日本語  |  日本語|日本 |\n"


def test_commands_take_a_folded_range_as_gq_prints_it(busy_alone: Shell) -> None:
    line = next(line for line in busy_alone.ok("gq").splitlines() if "(" in line.split()[1])
    word = line.split()[0]
    low, high = map(int, word.split("-"))
    ids = [str(one) for one in range(low, high + 1)]
    assert len(ids) > 20
    assert json.loads(busy_alone.ok("gctl", "--json", "hold", word))["changed"] == ids
    assert json.loads(busy_alone.ok("gctl", "--json", "update", word, "nice=5"))["changed"] == ids
    assert json.loads(busy_alone.ok("gctl", "--json", "release", word))["changed"] == ids
    assert busy_alone.ok("gq", "--quiet", "-j", word).split() == ids
    three = f"{low}-{low + 2}"
    assert [job["id"] for job in json.loads(busy_alone.ok("gshow", "--json", three))["jobs"]] == ids[:3]
    after = busy_alone.submit("--hold", "-d", f"afterany:{three},after:{low + 3}-{low + 4}+10", "--", "true")
    shown = f"afterany:{':'.join(ids[:3])},after:{low + 3}+10:{low + 4}+10"
    assert busy_alone.ok("gq", "--noheader", "-o", "%E", after).strip() == shown
    again = json.loads(busy_alone.ok("gsub", "--json", "--hold", "--resubmit", three))["ids"]
    assert len(again) == 3
    # What has ended in the meantime is left out.
    assert json.loads(busy_alone.ok("gcancel", "--json", ids[0]))["cancelled"] == ids[:1]
    busy_alone.type("gwait", ids[0])
    gone = json.loads(busy_alone.ok("gcancel", "--json", three))
    assert (gone["cancelled"], gone["ended"], gone["missing"]) == (ids[1:3], [], [])
    assert busy_alone.type("gwait", "--timeout", "60s", three).code == 1
    assert busy_alone.type("gcancel", three).err.count("had already ended") == 3


def test_ranges_with_unknown_jobs_and_huge_ones_are_refused_whole(busy_alone: Shell) -> None:
    last = int(busy_alone.submit("--hold", "--", "true"))
    done = busy_alone.type("gctl", "hold", f"{last}-{last + 1}")
    assert (done.code, done.err.splitlines()[0]) == (1, f"gctl: error: there is no job {last + 1}")
    assert busy_alone.type("gctl", "hold", "5-2").err.startswith("gctl: error: '5-2' is not a range of jobs")
    for command in ("gctl hold", "gq", "gwait", "gsub --resubmit", "gcancel"):
        done = busy_alone.type(*command.split(), "1-99999999999")
        assert done.code == 2, command
        assert "1-99999999999 is 99999999999 jobs; at most 20000 are accepted at once" in done.err
    assert "jobs were named" in busy_alone.type("gwait", ",".join(f"{low}-{low + 9999}" for low in (1, 2, 3))).err
    many = ",".join(f"afterok:1-{high}" for high in range(3000, 3005))
    assert "the ranges of the dependency name" in busy_alone.type("gsub", "-d", many, "--", "true").err
    assert "there is no job of" in busy_alone.type("gshow", f"{last + 1}-{last + 2}").err


def test_an_array_in_a_range_is_one_job(busy_alone: Shell) -> None:
    array = int(busy_alone.submit("--hold", "-a", "0-9", "--", "true"))
    after = busy_alone.submit("--hold", "--", "true")
    changed = json.loads(busy_alone.ok("gctl", "--json", "update", f"{array}-{after}", "nice=1"))["changed"]
    assert changed == [str(array), after]
    assert json.loads(busy_alone.ok("gcancel", "--json", f"{array}-{after}"))["cancelled"] == [str(array), after]
