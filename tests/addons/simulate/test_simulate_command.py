"""`gpusched simulate` as typed."""

from __future__ import annotations

import json
from hashlib import sha256

import pytest

from benchmarks.cases import EXAMPLES
from gpusched.cli.admin import main

TRACE = str(EXAMPLES / "tiresias_60jobs.csv.gz")


def typed(monkeypatch, capsys, *words):
    monkeypatch.setattr("sys.argv", ["gpusched", "simulate", *words])
    code = main()
    return code, capsys.readouterr()


def test_policies_are_shown_as_a_table(monkeypatch, capsys):
    code, shown = typed(monkeypatch, capsys, TRACE, "--nodes", "4x8", "--policy", "fcfs,fcfs+easy/spread")
    assert code == 0
    heading, *lines = shown.out.splitlines()
    assert heading.split()[:3] == ["POLICY", "WAIT", "P95"]
    assert [(line.split()[0], line.split()[-1]) for line in lines] == [
        ("fcfs", "b3b4b91ae85c671e"),
        ("fcfs+easy/spread", "76386006b9bff813"),
    ]


def test_policies_are_written_as_one_document(monkeypatch, capsys):
    code, shown = typed(monkeypatch, capsys, TRACE, "--nodes", "1x8", "--json")
    assert code == 0
    made = json.loads(shown.out)
    (row,) = made["policies"]
    assert (row["policy"], row["jobs"], made["dropped"]) == ("fcfs+easy", 60, {})
    assert row["wait_s"]["mean"] > 0


def test_gang_rules_use_run_times_as_estimates(monkeypatch, capsys, tmp_path):
    log = tmp_path / "log.txt"
    row = "{}|2026-01-01T00:00:0{}|2026-01-02T00:00:00|00:{}|{}|gres/gpu={}"
    # The last one passes the second only if it is known to be over in time.
    rows = [row.format(*one) for one in (("1", 0, "01:40", "00:01:40", 4), ("2", 1, "00:50", "00:00:50", 8))]
    rows.append(row.format("3", 2, "00:10", "01:00:00", 4))
    log.write_text("JobID|Submit|Start|Elapsed|Timelimit|ReqTRES\n" + "\n".join(rows) + "\n")
    shas = [typed_sha(monkeypatch, capsys, str(log), "--nodes", "1x8", *words) for words in ((), ("--rules", "gang"))]
    assert shas == [sha256(text).hexdigest()[:16] for text in (b"0\n100\n150", b"0\n100\n2")]


def typed_sha(monkeypatch, capsys, *words):
    return json.loads(typed(monkeypatch, capsys, *words, "--json")[1].out)["policies"][0]["starts_sha"]


def test_rigid_rules_give_one_schedule(monkeypatch, capsys, tmp_path):
    log = tmp_path / "log.swf"
    jobs = [(1, 0, 10, 3), (2, 1, 10, 2), (3, 2, 5, 1)]
    fields = "{} {} -1 {} {} -1 -1 {} {} -1 1 1 1 -1 1 -1 -1 -1"
    lines = [fields.format(n, at, run, procs, procs, run) for n, at, run, procs in jobs]
    log.write_text("; MaxProcs: 4\n" + "\n".join(lines) + "\n")
    assert typed_sha(monkeypatch, capsys, str(log), "--rules", "swf") == sha256(b"0\n10\n2").hexdigest()[:16]
    code, shown = typed(monkeypatch, capsys, str(log), "--rules", "gang")
    assert code == 2
    assert "job 1 asks for no GPU, which the rules gang do not allow" in shown.err


def test_options_unknown_to_the_rules_are_refused(monkeypatch, capsys, tmp_path):
    log = tmp_path / "log.txt"
    row = "1|2026-01-01T00:00:00|2026-01-01T00:00:00|00:01:40|8|gres/gpu=2"
    log.write_text(f"JobID|Submit|Start|Elapsed|ReqCPUS|ReqTRES\n{row}\n")
    code, shown = typed(monkeypatch, capsys, str(log), "--nodes", "1x8", "--rules", "gang")
    assert code == 2
    assert "job 1 asks for cores, memory or a fraction of a GPU, which the rules gang do not cover" in shown.err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([TRACE], "tiresias_60jobs.csv.gz does not state the size of its machine"),
        ([TRACE, "--nodes", "4x8", "--cluster", "x"], "both define the cluster"),
        ([TRACE, "--nodes", "4x8", "--policy", "lifo"], "'lifo' names no known order"),
        ([TRACE, "--nodes", "4x8", "--rows", "10"], "'10' is not a range of rows"),
        ([TRACE, "--nodes", "4x8", "--rows", "0:0"], "'0:0' is not a range of rows"),
        ([TRACE, "--nodes", "4x8", "--rows", "50:11"], "has 60 jobs, and not those of rows 50:11"),
        ([TRACE, "--nodes", "4x8", "--rules", "foo"], "'foo' is not a known set of rules: swf, gang"),
        ([TRACE, "--nodes", "4x8", "--rules", "swf"], "job 0 asks for GPUs, which the rules swf do not allow"),
        ([TRACE, "--nodes", "4x8", "--rules", "gang", "--policy", "saf"], "do not define 'saf' of saf: fcfs, sjf"),
        (
            [TRACE, "--nodes", "4x8", "--rules", "gang", "--policy", "fcfs+sjbf"],
            "do not define 'sjbf' of fcfs+sjbf",
        ),
        ([TRACE, "--nodes", "4x8", "--rules", "gang", "--policy", "default"], "'default' names no known order"),
        ([TRACE, "--nodes", "1x32", "--rules", "gang", "--tick"], "--tick cannot be combined with --rules gang"),
        (["nowhere.swf"], "there is no trace nowhere.swf"),
    ],
)
def test_a_mistake_is_one_sentence_and_a_hint(monkeypatch, capsys, words, text):
    code, shown = typed(monkeypatch, capsys, *words)
    assert code in (1, 2)
    error, hint = shown.err.splitlines()
    assert text in error
    assert hint.startswith("gpusched: hint: ")
