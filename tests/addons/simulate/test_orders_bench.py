"""What `python -m benchmarks.orders` makes of cases: figures, ratios to the references, goals, and its cache."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import orders
from benchmarks.cases import Case, half
from benchmarks.generated import generated
from benchmarks.orders import EASY, GREEDY, Cache, Figures, Plan, Ratios, averaged, measure, ratios, summaries
from gpusched.addons.simulate.cluster import nodes_of
from gpusched.addons.simulate.policies import policies_of
from gpusched.addons.simulate.trace import TraceJob
from gpusched.model.value import replace

CHECKOUT = Path(__file__).resolve().parents[3]

JOBS = tuple(
    TraceJob(str(number), 120 * number, 600 + 97 * number % 1000, 600 + 97 * number % 1000, gpus=1 + number % 8)
    for number in range(80)
)
CASE = Case("made up", JOBS, nodes_of("1x8"))


def figures(completion, wide=None, longest=10_000.0, fairness=None):
    return Figures(completion, wide, longest, fairness)


def a_plan(folder=None, names=("fair",), replays=1, case=CASE):
    policies = [*policies_of([EASY, GREEDY], is_exact=True), *policies_of(names)]
    return Plan([case], policies, replays, Cache(folder))


def test_completion_uses_the_better_reference_and_waits_use_easy():
    found = {
        EASY: figures(2000.0, wide=1000.0, longest=4000.0),
        GREEDY: figures(1000.0, wide=9000.0, longest=9000.0),
        "fair": figures(1500.0, wide=2000.0, longest=6000.0, fairness=0.5),
    }
    assert ratios("c", "fair", found) == Ratios("c", "fair", 1.5, 2.0, 1.5, 0.5)


def test_a_ratio_to_less_than_ten_minutes_is_omitted():
    found = {EASY: figures(599.0, wide=None, longest=599.0), GREEDY: figures(700.0), "fair": figures(9.0, 9.0, 9.0)}
    assert ratios("c", "fair", found) == Ratios("c", "fair", None, None, None, None)


def test_a_case_of_short_jobs_has_a_finer_grain():
    found = {EASY: figures(10.0, longest=599.0), GREEDY: figures(20.0), "fair": figures(15.0)}
    assert ratios("c", "fair", found, least_s=10.0).completion == 1.5
    assert ratios("c", "fair", found, least_s=10.1).completion is None


def test_generated_cases_offer_the_load_in_their_names_and_are_the_same_each_time():
    cases = generated()
    assert cases == generated()
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        span_s = max(job.submit_s for job in case.jobs)
        gpus = sum(len(node.gpus) for node in case.nodes)
        offered = sum(job.run_s * job.gpus for job in case.jobs) / span_s / gpus
        assert offered == pytest.approx(float(case.name.rpartition(" ")[2]), rel=0.01)
        assert max(job.gpus for job in case.jobs) == gpus
        assert len(case.jobs) <= 8000


def test_each_family_of_generated_cases_is_in_both_halves_and_no_case_is():
    cases = generated()
    tuning, held_out = half(cases, 1), half(cases, 2)
    assert sorted([*tuning, *held_out], key=cases.index) == cases
    families = [{case.name.partition(" @")[0].rstrip("0123456789 ") for case in part} for part in (tuning, held_out)]
    assert families[0] == families[1] == {"flood", "seconds", "minutes", "two groups", "lublin"}


def test_cases_of_one_source_are_in_the_same_half():
    cases = [Case(f"{source} @{nodes}x8", (), (), source) for source in ("a", "b", "c") for nodes in (2, 3)]
    assert {case.source for case in half(cases, 1)} == {"a", "c"}
    assert {case.source for case in half(cases, 2)} == {"b"}


def test_a_summary_shows_the_worst_case_and_the_geometric_mean():
    rows = [Ratios("a", "fair", 0.5, None, 1.0, None), Ratios("b", "fair", 2.0, None, 4.0, None)]
    completion, longest = summaries(rows)
    assert (completion.worst, completion.worst_case, completion.cases) == (2.0, "b", 2)
    assert completion.typical == pytest.approx(1.0)
    assert longest.typical == pytest.approx(2.0)
    assert not completion.holds
    assert orders.Summary("completion", 1.45, "a", 0.88, 3).holds
    assert not orders.Summary("completion", 1.45, "a", 0.89, 3).holds


def test_a_table_has_a_row_for_each_policy():
    rows = [Ratios("a", "fair", 0.5, None, 1.0, 0.25), Ratios("b", "fair", 2.0, None, 4.0, 0.75)]
    verdict = orders.GoalResult("two users", 7200.0, 10800.0, "2.0 h", "a sentence")
    head, line, row = orders.table({"fair": rows}, {"fair": [verdict]})
    assert head.count("|") == line.count("|") == row.count("|")
    assert row == "| `fair` | 1.00, 2.00 | - | 2.00, 4.00 | 0.50, 0.25 | 2.0 h |"


def test_replays_are_averaged_figure_by_figure():
    made = averaged([figures(1.0, None, 5.0, 0.5), figures(3.0, 4.0, 7.0, None)])
    assert made == Figures(2.0, 4.0, 6.0, 0.5)


def test_each_case_is_replayed_as_recorded_and_then_perturbed():
    (_, once), (_, twice) = *measure(a_plan()), *measure(a_plan(replays=2))
    assert list(once) == [EASY, GREEDY, "fair"]
    assert once != twice
    assert orders.figures_of(JOBS, CASE, policies_of([EASY])[0]) == once[EASY]


def test_the_references_know_run_times_whatever_limits_users_set():
    limited = replace(CASE, jobs=tuple(replace(job, estimate_s=9 * job.run_s) for job in JOBS))
    ((_, exact),), ((_, found),) = measure(a_plan()), measure(a_plan(case=limited))
    assert {name: exact[name] for name in (EASY, GREEDY)} == {name: found[name] for name in (EASY, GREEDY)}
    assert exact["fair"] != found["fair"]
    assert orders.digest(JOBS) != orders.digest(limited.jobs)


def test_measured_results_are_not_simulated_again(tmp_path, monkeypatch):
    (before,) = measure(a_plan(tmp_path))
    asked = []

    def measured(jobs, case, policy):
        asked.append(policy.name)
        return figures(0.0)

    monkeypatch.setattr(orders, "figures_of", measured)
    assert list(measure(a_plan(tmp_path))) == [before]
    assert asked == []
    # Another version of the code may decide otherwise; the references are what they are.
    monkeypatch.setattr(orders, "_code", lambda: "changed")
    list(measure(a_plan(tmp_path)))
    assert asked == ["fair"]
    list(measure(a_plan(tmp_path, ["throughput"], replays=2)))
    assert asked == ["fair", "throughput", EASY, GREEDY, "throughput"]


def test_parallel_and_serial_measurements_agree(tmp_path):
    trace = tmp_path / "lab.csv"
    rows = [f"{job.id},{job.submit_s},{job.run_s},{job.gpus}" for job in JOBS]
    trace.write_text("\n".join(["job_id,submit_s,duration_s,num_gpus", *rows, ""]))
    shown = []
    for parallel in "1", "2":
        out = tmp_path / f"{parallel}.json"
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.orders", str(trace), "--nodes", "1x8"]
        more = ["--replays", "2", "--parallel", parallel, "--json", str(out), "--only", "lab", "--policy", "fair,fifo"]
        done = subprocess.run([*command, *more], cwd=CHECKOUT, capture_output=True, text=True)
        assert done.returncode in (0, 1), done.stderr
        assert done.stdout.count("lab @1x8") >= 2
        shown.append((done.returncode, done.stdout, json.loads(out.read_text())))
    assert shown[0] == shown[1]
    assert set(shown[0][2]["figures"]["lab @1x8"]) == {EASY, GREEDY, "fair", "fifo"}


def test_the_command_refuses_an_unknown_policy_in_one_sentence():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.orders", "--policy", "nope"], cwd=CHECKOUT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "nope" in done.stderr
    assert "Traceback" not in done.stderr
