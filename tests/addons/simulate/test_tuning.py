"""`gpusched tune`: what is found on traces where the best is known, and what is said of it."""

from __future__ import annotations

import json
from contextlib import contextmanager
from random import Random

import pytest
from history_builders import Lab

from gpusched.addons.simulate import planner_run
from gpusched.addons.simulate.cluster import nodes_of
from gpusched.addons.simulate.trace import TraceJob
from gpusched.addons.simulate.tuning import Score, Search, is_better, knobs_of, objective_of, section_of, split
from gpusched.cli.admin import main
from gpusched.config import load_settings
from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.presets import PRESETS, preset
from gpusched.model.queue_settings import QueueSettings
from gpusched.model.settings import Settings
from gpusched.model.value import replace

NODES = nodes_of("1x4")


def blocks(count: int, *, small_s: int, first_at: int = 0) -> list[TraceJob]:
    """Again and again two jobs of all four GPUs, then four of one.

    As they come the small ones wait for both wide ones, 399 s; when small ones go first, for one, 199 s.
    """
    jobs = []
    for number in range(count):
        at = first_at + number * 4000
        for submit_s, gpus, run_s in ((at, 4, 200), (at, 4, 200), *[(at + 1, 1, small_s)] * 4):
            jobs.append(TraceJob(str(len(jobs)), submit_s, run_s, run_s, gpus=gpus))
    return jobs


def search(jobs, text, *, tries=12, seed=0, settings=None):
    def run(settings, jobs):
        return planner_run.run(jobs, NODES, settings)

    return Search(jobs, objective_of(text), settings or Settings(), run, tries, seed)


def test_the_known_best_weight_is_found():
    jobs = blocks(10, small_s=150)
    by_hand = PrioritySettings(weight_age=0, weight_size=1e5, favor_small=True)
    goal = objective_of("wait_mean of small")
    best = goal.score(planner_run.run(jobs, NODES, Settings(priority=by_hand))).value
    today = goal.score(planner_run.run(jobs, NODES, Settings())).value
    assert (today, best) == (399, 199)
    found, score = search(jobs, "wait_mean of small").find()
    assert score.value == best
    assert (found.favor_small and found.weight_size > 0) or found.weight_short > 0


def test_the_result_keeps_the_limits():
    # When small ones go first the second wide one waits for 350 s.
    jobs = blocks(10, small_s=150)
    _, score = search(jobs, "wait_mean of small, wait_most of width>=4 <= 340s").find()
    assert (score.value, score.limited, score.excess) == (399, (200,), 0)


def test_later_settings_are_steps_from_the_best():
    seen = []
    jobs = blocks(10, small_s=150)

    def run(settings, jobs):
        seen.append(settings.priority)
        return planner_run.run(jobs, NODES, settings)

    made = Search(jobs, objective_of("wait_mean of small"), Settings(), run, 12, 3)
    made.find()
    # Today's, which are those of the preset fair, and the other presets; then what is drawn, then steps.
    assert seen[:4] == [preset(name) for name in PRESETS]
    seen[1:4] = []
    assert len(seen) == 13
    assert len(set(seen)) == 13
    names = [one.name for one in knobs_of(jobs, Settings())]

    def changed(one, other):
        return sum(getattr(one, name) != getattr(other, name) for name in names)

    assert all(min(changed(one, other) for other in seen[:9]) <= 4 for one in seen[9:])
    assert all(changed(one, Settings().priority) >= 2 for one in seen[1:9])


def test_most_settings_are_tried_on_few_jobs_and_few_on_all():
    jobs = blocks(400, small_s=150)
    made = search(jobs, "wait_mean of small", tries=40)
    assert made.rounds() == [(27, 266), (9, 800), (3, 2400)]
    assert made.steps == 13
    assert made.cost() == 27 * 266 + 9 * 800 + 3 * 2400 + (1 + 3 + 13) * 2400
    late = [replace(job, queue="b" if number > 1000 else "a") for number, job in enumerate(jobs)]
    assert search(late, "wait_mean of queue=b", tries=40).rounds() == [(27, 2400)]
    assert search(jobs, "wait_mean", tries=1).rounds() == [(1, 2400)]


def test_only_relevant_settings_are_searched():
    jobs = blocks(10, small_s=150)
    names = {one.name for one in knobs_of(jobs, Settings())}
    assert {"weight_age", "weight_size", "weight_short", "weight_whole", "backfill_depth"} <= names
    assert names.isdisjoint({"weight_fairshare", "half_life_s", "weight_queue", "weight_qos", "weight_fit"})
    people = [replace(job, user=job.id[-1], gpus=1, cpus=2.0, estimate_s=9) for job in jobs]
    queues = {"a": QueueSettings("a", factor=0.5), "b": QueueSettings("b")}
    names = {one.name for one in knobs_of(people, Settings(queue=queues))}
    assert {"weight_fairshare", "half_life_s", "weight_queue", "weight_fit"} <= names
    assert names.isdisjoint({"weight_size", "weight_short", "weight_whole"})


@pytest.mark.parametrize("number", range(30))
def test_every_drawn_setting_can_be_written_and_read(number, tmp_path):
    random = Random(number)
    jobs = [replace(job, user=job.id[-1], cpus=1.0) for job in blocks(2, small_s=1)]
    knobs = knobs_of(jobs, Settings())
    priority = replace(PrioritySettings(), **{one.name: one.draw(random) for one in knobs})
    priority = replace(priority, **{one.name: one.step(random, getattr(priority, one.name), 0.3) for one in knobs})
    file = tmp_path / "priority.toml"
    file.write_text(section_of(priority))
    assert load_settings(str(file), {}).settings.priority == priority


@pytest.mark.parametrize(
    ("after", "before", "expected"),
    [
        (Score(90, (), 0), Score(100, (), 0), True),
        (Score(99.5, (), 0), Score(100, (), 0), False),
        (Score(0, (), 0), Score(0, (), 0), False),
        (Score(50, (9,), 0.2), Score(100, (1,), 0), False),
        (Score(150, (9,), 0.2), Score(100, (12,), 0.5), True),
        (Score(96, (9,), 0.2), Score(100, (9,), 0.2), True),
        (Score(99.5, (9,), 0.2), Score(100, (9,), 0.2), False),
    ],
)
def test_limits_decide_before_the_goal_and_ties_need_a_margin(after, before, expected):
    assert is_better(after, before) is expected


def test_later_jobs_are_held_out_in_any_file_order():
    jobs = blocks(10, small_s=150)
    mixed = list(jobs)
    Random(1).shuffle(mixed)
    first, later = split(mixed, objective_of("wait_mean"), 0.4)
    assert (len(first), len(later)) == (36, 24)
    assert max(job.submit_s for job in first) <= min(job.submit_s for job in later)


# --- as typed -----------------------------------------------------------------------------------


@pytest.fixture
def typed(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPUSCHED_HOME", str(tmp_path / "home"))

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["gpusched", *words])
        code = main()
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def table(path, jobs):
    path.write_text(
        "job_id,submit_s,duration_s,num_gpus\n"
        + "".join(f"{job.id},{job.submit_s},{job.run_s},{job.gpus}\n" for job in jobs)
    )


@pytest.fixture
def alike(tmp_path):
    table(tmp_path / "alike.csv", blocks(40, small_s=150))
    return "alike.csv"


@pytest.fixture
def two_halves(tmp_path):
    """Small jobs are short at first, and very long later, and nobody says so: there they should not go first."""
    jobs = [*blocks(20, small_s=150), *blocks(20, small_s=2500, first_at=80_000)]
    lines = [
        f"{number} {job.submit_s} -1 {job.run_s} {job.gpus} -1 -1 {job.gpus} 3000 -1 1 1 1 -1 1 -1 -1 -1\n"
        for number, job in enumerate(jobs, start=1)
    ]
    (tmp_path / "halves.swf").write_text("; MaxProcs: 4\n" + "".join(lines))
    return "halves.swf"


GOAL = ("--goal", "wait_mean of small, wait_most <= 2h", "--nodes", "1x4", "--hold-out", "0.5", "--tries", "12")


def test_a_gain_on_held_out_jobs_is_written_and_passes_the_check(typed, alike, monkeypatch):
    code, out, err = typed("tune", alike, *GOAL, "--write", "try.toml")
    assert code == 0
    assert (
        "Better than the current settings on the jobs held out: wait_mean of small 3:19 instead of 6:39, wait_most "
        in out
    )
    assert "wrote try.toml" in err
    assert "\n[priority]\n" in out
    monkeypatch.setenv("GPUSCHED_CONFIG", "try.toml")
    assert typed("config", "check")[0] == 0
    # What is written does as it says.
    monkeypatch.delenv("GPUSCHED_CONFIG")
    code, out, _ = typed("simulate", alike, "--nodes", "1x4", "--rows", "120:120", "--config", "try.toml", "--json")
    (today, new) = json.loads(out)["policies"]
    assert new["wait_s"]["mean"] < today["wait_s"]["mean"]


def test_a_loss_on_held_out_jobs_is_reported_and_not_written(typed, two_halves, tmp_path):
    words = (two_halves, "--goal", "wait_mean", *GOAL[4:], "--write", "try.toml")
    code, out, err = typed("tune", *words)
    assert code == 1
    assert "Keep the current settings: those found are not better on the jobs held out" in out
    assert "try.toml was not written" in err
    assert not (tmp_path / "try.toml").exists()
    made = json.loads(typed("tune", *words, "--json")[1])
    assert (made["advice"], made["written"]) == ("keep", None)
    assert made["searched"]["found"]["value"] < made["searched"]["today"]["value"]
    assert made["held_out"]["found"]["value"] > made["held_out"]["today"]["value"]


def test_a_limit_violated_on_held_out_jobs_is_named(typed, two_halves):
    # The first half keeps it however it is ordered; in the second wide jobs wait for long when small ones go first.
    words = (two_halves, "--goal", "wait_mean of small, wait_most of width>=4 <= 30m", *GOAL[4:])
    code, out, _ = typed("tune", *words)
    assert code == 1
    verdict = next(line for line in out.splitlines() if line.startswith("Keep the current settings"))
    assert "wait_mean of small 3:19 instead of 6:39" in verdict
    assert "Limits exceeded there: wait_most of width>=4 <= 30:00." in verdict
    assert out.count("(!)") == 1


def test_simple_rules_better_than_both_are_named(typed, alike, tmp_path):
    # Today is the worst order for the goal, and one try does not better it.
    (tmp_path / "worst.toml").write_text("[priority]\nweight_age = 0\nweight_size = 100000\nfavor_small = true\n")
    words = (alike, "--goal", "wait_most of width>=4", *GOAL[2:-1], "1", "--config", "worst.toml", "--seed", "1")
    made = json.loads(typed("tune", *words, "--json")[1])
    scores = {name: one["value"] for name, one in made["held_out"].items()}
    assert scores["fcfs+easy"] < scores["today"]
    assert ("Plain fcfs+easy serves the goal better" in made["said"]) == (scores["fcfs+easy"] < scores["found"])


def test_the_same_seed_finds_the_same(typed, alike):
    first, again, other = (typed("tune", alike, *GOAL, "--json", "--seed", seed)[1] for seed in ("5", "5", "6"))
    assert first == again
    assert json.loads(first)["changes"] != json.loads(other)["changes"]


def test_the_document_is_written(typed, alike):
    made = json.loads(typed("tune", alike, *GOAL, "--json")[1])
    assert made["goal"] == "wait_mean of small, wait_most <= 2:00:00"
    assert made["jobs"] == {"searched": 120, "held_out": 120}
    assert list(made["held_out"]) == ["today", "fcfs+easy", "found"]
    (limit,) = made["held_out"]["found"]["limits"]
    assert (limit["term"], limit["limit"], limit["kept"]) == ("wait_most", 7200.0, True)
    assert made["advice"] == "change"
    assert made["preset"] in PRESETS
    assert made["significance"] == {"parts": 8, "better": 8, "worse": 0, "p": 1 / 256, "significant": True}


def test_current_settings_come_from_the_file(typed, alike, tmp_path):
    best = "[priority]\nweight_age = 0\nweight_size = 100000\nfavor_small = true\n"
    (tmp_path / "best.toml").write_text(best)
    code, out, _ = typed("tune", alike, *GOAL, "--config", "best.toml")
    assert code == 1
    assert "Keep the current settings: nothing tried is better" in out
    assert "[priority]" not in out


def test_the_full_daemon_can_be_tuned(typed, alike):
    made = json.loads(typed("tune", alike, *GOAL[:-1], "3", "--tick", "--json")[1])
    assert made["held_out"]["today"]["value"] == 399


def test_the_history_of_this_machine_can_be_tuned(typed, tmp_path):
    path = tmp_path / "home" / "gpusched.db"
    path.parent.mkdir()
    lab = Lab(path)
    (tmp_path / "home" / "config.toml").write_text('[default]\nqueue = "vision"\n[queue.vision]\n')
    for hour in range(60):
        lab.ran(3600.0 * hour, 3000.0, gpus=2, user="ann", time_limit_s=3600)
    lab.close()
    code, out, err = typed(
        "tune", "--from-history", "--goal", "wait_mean", "--tries", "1", "--json", "--hold-out", "0.4"
    )
    assert (code, err) == (1, "")
    made = json.loads(out)
    assert made["jobs"] == {"searched": 36, "held_out": 24}
    assert made["held_out"]["today"]["value"] == 0
    assert made["advice"] == "keep"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "no goal is given"),
        (("--goal", "wait_p90"), "'wait_p90' is not a measure of a goal"),
        (("--goal", "wait_p95 of tiny"), "'tiny' is not a group of jobs"),
        (("--goal", "wait_mean of wide"), "none of the 168 jobs to search on belongs to the group 'wide'"),
        (("--goal", "wait_mean", "--tries", "0"), "--tries 0 is less than 1"),
        (("--goal", "wait_mean", "--hold-out", "1"), "--hold-out 1 is not between 0 and 1"),
        (("--goal", "wait_mean", "--hold-out", "nan"), "--hold-out nan is not between 0 and 1"),
        (
            ("--goal", "wait_mean", "--hold-out", "0.05"),
            "of 240 jobs --hold-out 0.05 leaves 12 to report on, and 20 are",
        ),
        (("--goal", "wait_mean", "--write", "alike.csv"), "alike.csv already exists"),
        (("--goal", "wait_mean", "--write", "no/where.toml"), "there is no folder for no/where.toml"),
        (
            ("--goal", "wait_mean of small, wait_mean of width>=4 <= 1s", "--tries", "3"),
            "none of 3 settings tried, no preset and not the current settings meet the goal: the nearest misses",
        ),
        (("--goal", "wait_mean", "--config", "none.toml"), "there is no config file none.toml"),
        (("--goal", "wait_mean", "--since", "3d"), "--since needs --from-history"),
    ],
)
def test_a_mistake_is_one_sentence_and_a_hint(typed, alike, words, text):
    code, _, err = typed("tune", alike, "--nodes", "1x4", *words)
    assert code in (1, 2)
    error, hint = err.splitlines()
    assert text in error
    assert hint.startswith("gpusched: hint: ")


def test_progress_never_decreases_and_reaches_the_end(tmp_path, monkeypatch):
    from gpusched.addons.simulate import schedules
    from gpusched.addons.simulate import tune as command

    told: list[tuple[int, int]] = []

    @contextmanager
    def progress(name):
        yield lambda done, of: told.append((done, of))

    monkeypatch.setenv("GPUSCHED_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(schedules, "progress", progress)
    table(tmp_path / "alike.csv", blocks(30, small_s=150))
    command.tune(trace=str(tmp_path / "alike.csv"), nodes="1x4", goal="wait_mean", tries=6, hold_out=0.5)
    assert told == sorted(told)
    # Today's, three presets and six others on the first half, today's there once more for the report, three on the
    # second.
    assert told[-1] == (11 * 90 + 3 * 90, 11 * 90 + 3 * 90)


# --- presets, and what is chance ------------------------------------------------------------------


SMALL_FIRST, WIDE_FIRST = (
    Settings(
        priority=PrioritySettings(
            order="multifactor", weight_age=0, weight_short=0, weight_whole=0, weight_size=1e5, favor_small=is_small
        )
    )
    for is_small in (True, False)
)


def test_a_preset_that_is_best_is_written_by_its_name():
    def run(settings, jobs):
        is_preset = settings.priority == preset("throughput")
        return planner_run.run(jobs, NODES, SMALL_FIRST if is_preset else WIDE_FIRST)

    jobs = blocks(10, small_s=150)
    found, _ = Search(jobs, objective_of("wait_mean of small"), WIDE_FIRST, run, 3, 1).find()
    assert section_of(found) == '[priority]\npreset = "throughput"\n'


@pytest.mark.parametrize("order", ["response_ratio", "fifo"])
def test_steps_from_a_preset_of_another_order_keep_that_order(order):
    seen = []

    def run(settings, jobs):
        seen.append(settings.priority)
        # Only this order makes a schedule good here.
        is_good = settings.priority.order == order
        return planner_run.run(jobs, NODES, SMALL_FIRST if is_good else WIDE_FIRST)

    Search(blocks(10, small_s=150), objective_of("wait_mean of small"), WIDE_FIRST, run, 30, 1).find()
    steps = seen[-10:]
    assert {one.order for one in steps} == {order}
    assert len(set(steps)) == 10


def test_a_gain_in_one_part_alone_is_reported_as_chance(typed, tmp_path):
    # Wide jobs queue up once in the held-out half; else nobody waits, whatever goes first.
    calm = [TraceJob(str(number), number * 4000, 100, 100, gpus=1) for number in range(300)]
    busy = [replace(job, id=f"b{job.id}", submit_s=job.submit_s + 900_000) for job in blocks(6, small_s=150)]
    early = [replace(job, id=f"a{job.id}") for job in blocks(40, small_s=150)]
    table(tmp_path / "once.csv", sorted([*calm, *busy, *early], key=lambda job: job.submit_s))
    words = ("tune", "once.csv", "--goal", "wait_mean of small", "--nodes", "1x4", "--tries", "3", "--hold-out", "0.3")
    code, out, _ = typed(*words, "--write", "try.toml")
    assert code == 1
    verdict = next(line for line in out.splitlines() if line.startswith("Keep the current settings"))
    assert "the gain of those found may be chance: wait_mean of small " in verdict
    assert not (tmp_path / "try.toml").exists()
    made = json.loads(typed(*words, "--json")[1])
    assert made["held_out"]["found"]["value"] < made["held_out"]["today"]["value"] * 0.9
    assert made["advice"] == "keep"
    assert made["significance"]["significant"] is False
    assert made["significance"]["p"] >= 0.05
