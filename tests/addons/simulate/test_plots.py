"""Pictures: what is drawn, and that it is drawn where matplotlib is installed."""

from __future__ import annotations

import pytest

from gpusched.addons.simulate import cluster, planner_run, plots, policies
from gpusched.addons.simulate.occupancy import Series, over_time
from gpusched.addons.simulate.plots import Bar
from gpusched.addons.simulate.trace import TraceJob
from gpusched.errors import UserError
from gpusched.extras import install_command


def job(submit_s, run_s, gpus=0, procs=0, user="ann"):
    return TraceJob("j", submit_s, run_s, run_s, gpus=gpus, procs=procs, user=user)


def simulated(jobs, machines):
    return planner_run.run(jobs, machines, policies.rules_of("fcfs").settings(), keeps_places=True)


def test_a_job_on_adjacent_gpus_is_one_bar():
    outcome = simulated([job(0, 9, 3), job(1, 5, 2), job(2, 4, 6)], cluster.nodes_of("2x4"))
    assert sorted(plots.bars(outcome, outcome.runs), key=lambda bar: (bar.begin_s, bar.first)) == [
        Bar(0, 0, 9, 0, 3),
        Bar(1, 1, 6, 4, 2),
        Bar(2, 9, 13, 0, 6),
    ]


def test_without_gpus_a_job_uses_the_lowest_free_processors():
    jobs = [job(0, 5, procs=2), job(0, 20, procs=1), job(1, 9, procs=4)]
    outcome = simulated(jobs, cluster.processors(6))
    assert list(plots.bars(outcome, outcome.runs)) == [
        Bar(0, 0, 5, 0, 2),
        Bar(1, 0, 20, 2, 1),
        Bar(2, 5, 14, 0, 2),
        Bar(2, 5, 14, 3, 2),
    ]


def test_no_processor_is_drawn_twice_at_once():
    jobs = [job(number * 3, 10 + number % 7 * 5, procs=1 + number % 5) for number in range(120)]
    outcome = simulated(jobs, cluster.processors(16))
    taken = set()
    for bar in plots.bars(outcome, outcome.runs):
        for number in range(bar.first, bar.first + bar.count):
            for second in range(bar.begin_s, bar.end_s):
                assert number < 16
                assert (number, second) not in taken
                taken.add((number, second))
    assert len(taken) == sum(one.procs * one.run_s for one in jobs)


@pytest.mark.parametrize(
    ("most", "at", "means"),
    [
        (4, [1.25, 3.75, 6.25, 8.75], [1.0, 0.6, 0.0, 0.5]),
        (2, [2.5, 7.5], [0.8, 0.25]),
        (1, [5.0], [0.525]),
        (100, [number + 0.5 for number in range(10)], [1, 1, 1, 1, 0, 0, 0, 0, 0, 1.25]),
    ],
)
def test_equal_spans_have_means(most, at, means):
    found_at, found = plots.means_over_time([0, 4, 9, 10], [1.0, 0.0, 1.25, 9.0], most)
    assert found_at == pytest.approx(at)
    assert found == pytest.approx(means)


def test_a_distribution_is_computed():
    assert plots.cdf([3, 1, 2, 2]) == ([1, 2, 2, 3], [0.25, 0.5, 0.75, 1])
    values, parts = plots.cdf(range(100_000))
    assert len(values) < 5000
    assert (values[-1], parts[-1]) == (99_999, 1)
    assert all(part == (value + 1) / 100_000 for value, part in zip(values, parts, strict=True))


def test_a_policy_name_becomes_a_file_name():
    assert plots.file_name("fcfs+easy/spread") == "fcfs+easy-spread"
    assert plots.file_name("../x") == "---x"


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="matplotlib, which is not installed") as caught:
        plots.folder_of(str(tmp_path / "pictures"))
    assert caught.value.hint == install_command("plot")
    assert not (tmp_path / "pictures").exists()


def test_a_file_instead_of_the_folder_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(plots, "find_spec", lambda name: object())
    (tmp_path / "taken").write_text("")
    with pytest.raises(UserError, match="cannot be a folder"):
        plots.folder_of(str(tmp_path / "taken"))


@pytest.mark.parametrize("machines", [cluster.nodes_of("2x4"), cluster.processors(8)])
def test_all_plots_are_drawn(machines, tmp_path):
    count = {"gpus": 3} if machines[0].gpus else {"procs": 3}
    jobs = [job(number * 40, 100 + number % 5, user=f"u{number % 2}", **count) for number in range(30)]
    outcome, series = simulated(jobs, machines), Series()
    over_time(outcome, series)
    drawn = [plots.Drawn("fcfs/best", outcome, series)]
    assert [path.name for path in plots.write(plots.folder_of(str(tmp_path / "a" / "b")), drawn)] == [
        "gantt-fcfs-best.png",
        "shares-fcfs-best.png",
        "utilisation.png",
        "wait-cdf.png",
        "slowdown-cdf.png",
    ]
    for path in (tmp_path / "a" / "b").iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 5000
