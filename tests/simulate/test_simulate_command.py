"""`gpusched simulate` as typed."""

from __future__ import annotations

import json

import pytest

from gpusched.cli.admin import main
from gpusched.simulate import examples

TRACE = str(examples.FOLDER / "tiresias_60jobs.csv.gz")


def typed(monkeypatch, capsys, *words):
    monkeypatch.setattr("sys.argv", ["gpusched", "simulate", *words])
    code = main()
    return code, capsys.readouterr()


def test_a_table_of_policies(monkeypatch, capsys):
    code, shown = typed(monkeypatch, capsys, TRACE, "--nodes", "4x8", "--policy", "fcfs,fcfs+easy/spread")
    assert code == 0
    heading, *lines = shown.out.splitlines()
    assert heading.split()[:3] == ["POLICY", "WAIT", "P95"]
    assert [(line.split()[0], line.split()[-1]) for line in lines] == [
        ("fcfs", "b3b4b91ae85c671e"),
        ("fcfs+easy/spread", "76386006b9bff813"),
    ]


def test_one_document(monkeypatch, capsys):
    code, shown = typed(monkeypatch, capsys, TRACE, "--nodes", "1x8", "--json")
    assert code == 0
    made = json.loads(shown.out)
    (row,) = made["policies"]
    assert (row["policy"], row["jobs"], made["dropped"]) == ("fcfs+easy", 60, {})
    assert row["wait_s"]["mean"] > 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([TRACE], "tiresias_60jobs.csv.gz does not say how large its machine is"),
        ([TRACE, "--nodes", "4x8", "--cluster", "x"], "both say what the machines are"),
        ([TRACE, "--nodes", "4x8", "--policy", "lifo"], "'lifo' names no order that is known"),
        ([TRACE, "--nodes", "4x8", "--rows", "10"], "'10' names no rows of a trace"),
        ([TRACE, "--nodes", "4x8", "--rows", "0:0"], "'0:0' names no rows of a trace"),
        ([TRACE, "--nodes", "4x8", "--rows", "50:11"], "has 60 jobs, and not those of rows 50:11"),
        (["nowhere.swf"], "there is no trace nowhere.swf"),
    ],
)
def test_a_mistake_is_one_sentence_and_a_hint(monkeypatch, capsys, words, text):
    code, shown = typed(monkeypatch, capsys, *words)
    assert code in (1, 2)
    error, hint = shown.err.splitlines()
    assert text in error
    assert hint.startswith("gpusched: hint: ")
