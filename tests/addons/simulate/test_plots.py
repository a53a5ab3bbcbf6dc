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


@pytest.mark.parametrize(
    ("lasts_s", "unit"), [(90, "seconds"), (120, "minutes"), (7199, "minutes"), (7200, "hours"), (172_800, "days")]
)
def test_time_is_in_units_that_fit_and_the_same_for_each_policy(lasts_s, unit):
    short, long = Series(), Series()
    short.at_s.extend([10, 20])
    long.at_s.extend([10, 10 + lasts_s])
    clock = plots.TimeAxis.of([plots.Drawn("a", None, short), plots.Drawn("b", None, long)])
    assert (clock.unit, clock.begin_s, clock.end_s) == (unit, 10, 10 + lasts_s)
    assert clock(10 + clock.unit_s) == 1


@pytest.mark.parametrize(("shape", "users"), [("2x4xA100-80GiB", 3), ("2x4xA100-80GiB", 1), ("10x4xT4", 12)])
def test_a_gantt_chart_names_cards_divides_nodes_and_explains_its_colors(shape, users):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    jobs = [job(number * 40, 100 + number % 5, user=f"u{number % users}", gpus=3) for number in range(36)]
    outcome, series = simulated(jobs, cluster.nodes_of(shape)), Series()
    over_time(outcome, series)
    drawn = plots.Drawn("fcfs", outcome, series)
    figure = Figure()
    axes = figure.add_subplot()
    plots._gantt(axes, drawn, plots.TimeAxis.of([drawn]))
    names = [label.get_text() for label in axes.get_yticklabels()]
    nodes = len(cluster.nodes_of(shape))
    assert len(axes.lines) == nodes - 1
    assert len(names) == (8 if nodes == 2 else 10)
    assert all(shape.split("x")[2].split("-")[0] in name for name in names)
    legend = axes.get_legend()
    if users == 1:
        assert legend is None
        assert figure.axes[1].get_ylabel().startswith("wait in ")
        assert "by wait" in axes.get_title()
        return
    labels = [text.get_text() for text in legend.get_texts()]
    assert len(labels) == min(users, 9)
    assert ("4 others" in labels) is (users == 12)
