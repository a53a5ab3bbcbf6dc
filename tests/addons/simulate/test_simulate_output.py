"""What `gpusched simulate` prints, as it is read and as scripts read it."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest
from shell import compare

from gpusched.addons.simulate import schedules
from gpusched.cli.admin import main
from gpusched.extras import install_command

GOLDEN = Path(__file__).parent / "golden"
USERS = ("ann", "bob", "eve", "ida\x1b[31m")


@pytest.fixture
def trace(tmp_path):
    """Sixty jobs of four users with deadlines, and two that are left out."""
    lines = ["job_id,submit_s,duration_s,num_gpus,user,queue,deadline_s"]
    for number in range(60):
        submit_s, run_s = number * 37 % 700, 30 + number * 53 % 400
        deadline = submit_s + 900 if number % 3 == 0 else ""
        queue = "vision" if number % 2 else "theory"
        lines.append(f"{number},{submit_s},{run_s},{1 + number % 6},{USERS[number % 4]},{queue},{deadline}")
    lines += ["60,5,10,99,ann,theory,", "61,5,0,1,ann,theory,"]
    path = tmp_path / "own.csv"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture
def shown(monkeypatch, capsys):
    """Type `gpusched simulate ...`; exit code, stdout, stderr."""

    def typed(*words):
        monkeypatch.setattr("sys.argv", ["gpusched", "simulate", *words])
        code = main()
        done = capsys.readouterr()
        return code, done.out, done.err

    return typed


BOTH = ("--nodes", "2x4", "--policy", "fcfs+easy,sjf+easy")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("simulate.txt", BOTH),
        ("simulate-details.txt", (*BOTH, "--details", "--wait-bound", "10m")),
        ("simulate-gains.txt", (*BOTH, "--gains")),
        ("simulate-queues.txt", (*BOTH, "--by", "queue", "--gains")),
        ("simulate.csv", (*BOTH, "--csv", "--wait-bound", "10m")),
        ("simulate-gains.csv", (*BOTH, "--csv", "--gains")),
    ],
)
def test_the_report_is_printed(name, words, trace, shown):
    code, out, err = shown(trace, *words)
    assert code == 0
    compare(name, out + err, GOLDEN)


def test_the_document_and_the_rows_agree(trace, shown):
    _, out, _ = shown(trace, *BOTH, "--json", "--wait-bound", "10m")
    made = json.loads(out)
    _, out, _ = shown(trace, *BOTH, "--csv", "--wait-bound", "10m")
    rows = list(csv.DictReader(io.StringIO(out)))
    for policy, row in zip(made["policies"], rows, strict=True):
        assert row["policy"] == policy["policy"]
        assert float(row["wait_s_p95"]) == policy["wait_s"]["p95"]
        assert float(row["finish_time_fairness_mean"]) == policy["finish_time_fairness"]["mean"]
        assert int(row["late_missed"]) == policy["late"]["missed"]
        assert int(row["overdue_jobs"]) == policy["overdue"]["jobs"] == 20
    assert sum(user["jobs"] for user in made["policies"][0]["users"]) == 60
    assert made["policies"][0]["users"][0]["dominant_share"]["most"] > 0
    assert [one["name"] for one in made["policies"][0]["queues"]] == ["theory", "vision"]
    (compared,) = made["gains"]
    assert compared["gain"] + compared["lose"] + compared["same"] == len(compared["listed"]) == 4


def names_in(found):
    """Every name of a document, at any depth; not those of policies and reasons."""
    if isinstance(found, dict):
        inner = [part for name, part in found.items() if name not in ("dropped", "by_queue")]
        inner += [part for name in ("dropped", "by_queue") for part in found.get(name, {}).values()]
        return {*found, *(name for part in inner for name in names_in(part))}
    return {name for part in found for name in names_in(part)} if isinstance(found, list) else set()


@pytest.mark.parametrize(
    "words", [BOTH, ("--nodes", "1x8", "--policy", "fcfs+easy,sjf", "--tick", "--fail-rate", "0.2")]
)
def test_every_name_of_the_document_is_in_the_reference(words, trace, shown):
    code, out, _ = shown(trace, *words, "--json", "--wait-bound", "10m")
    assert code == 0
    page = Path(__file__).parents[3] / "docs" / "reference" / "simulation.md"
    assert names_in(json.loads(out)) - set(re.findall(r"`([a-z_0-9]+)`", page.read_text("utf-8"))) == set()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--nodes", "2x4", "--csv", "--json"), "--csv and --json cannot be combined"),
        (("--nodes", "2x4", "--gains"), "--gains needs two policies, and fcfs+easy is one"),
        (("--nodes", "2x4", "--wait-bound", "soon"), "soon"),
        (("--nodes", "2x4", "--by", "colour"), "--by 'colour' is neither user nor queue"),
    ],
)
def test_a_mistake_is_one_sentence_and_a_hint(words, text, trace, shown):
    code, out, err = shown(trace, *words)
    assert code in (1, 2)
    assert out == ""
    assert text in err.splitlines()[0]
    assert "hint" in err


def test_plots_are_refused_before_the_simulation_starts(trace, shown, monkeypatch):
    monkeypatch.setattr("gpusched.addons.simulate.plots.find_spec", lambda name: None)
    monkeypatch.setattr(
        "gpusched.addons.simulate.planner_run.run", lambda *words, **more: pytest.fail("it was simulated")
    )
    code, _, err = shown(trace, *BOTH, "--plot", "pictures")
    assert code == 1
    assert err.splitlines() == [
        "gpusched: error: --plot draws with matplotlib, which is not installed",
        f"gpusched: hint: {install_command('plot')}",
    ]


def test_progress_is_drawn_on_a_terminal(monkeypatch):
    from rich.console import Console

    now = [100.0]
    monkeypatch.setattr("gpusched.addons.simulate.schedules.time.monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    with schedules.progress("fcfs+easy", console) as tell:
        now[0] += 2
        tell(5_000, 20_000)
        now[0] += 0.01
        tell(6_000, 20_000)
    text = console.file.getvalue()
    assert "fcfs+easy" in text
    assert "5,000 of 20,000 jobs, 2,500 jobs/s, 0:06 left" in text
    assert "6,000 of" not in text


def test_no_progress_is_drawn_in_a_pipe(capsys):
    with schedules.progress("fcfs+easy") as tell:
        assert tell is None
    assert capsys.readouterr().err == ""
