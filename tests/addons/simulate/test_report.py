"""All measures in one form: by hand, as documented, and as they are read."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from gpusched.addons.simulate import cluster, measures, planner_run, policies
from gpusched.addons.simulate.comparison import compare_users
from gpusched.addons.simulate.measures import QueueResult
from gpusched.addons.simulate.outcome import Attempt, Group, Outcome, groups
from gpusched.addons.simulate.trace import TraceJob, read_trace

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "simulation.md").read_text(encoding="utf-8")


def job(submit_s, run_s, gpus=1, user="ann", **more):
    return TraceJob("j", submit_s, run_s, run_s, gpus=gpus, user=user, **more)


def simulated(jobs, policy="fcfs+easy", shape="2x4"):
    return planner_run.run(jobs, cluster.nodes_of(shape), policies.rules_of(policy).settings(), keeps_places=True)


def names_in(found):
    """Every name of a document, at any depth."""
    if isinstance(found, dict):
        return {*found, *(name for value in found.values() for name in names_in(value))}
    if isinstance(found, list):
        return {name for value in found for name in names_in(value)}
    return set()


def test_every_name_of_the_document_is_explained():
    jobs = [job(0, 100, 3), job(1, 50, 8, "bob", deadline_s=60), job(2, 10)]
    first, second = simulated(jobs), simulated(jobs, "sjf")
    made = measures.Schedule("fcfs+easy", first, 8, wait_bound_s=30).document()
    compared = compare_users("fcfs+easy", first, "sjf", second).document()
    known = set(re.findall(r"`([a-z_0-9]+)`", PAGE))
    assert names_in([made, compared]) - known == set()
    assert {one.name for one in fields(QueueResult)} - known == set()
    columns = measures.Schedule("fcfs+easy", first, 8).row()
    endings = r"_(mean|median|p95|p99|most|jobs|missed|part|by_s|bound_s)$"
    assert {name for name in columns if name not in known and re.sub(endings, "", name) not in known} == set()


def test_a_row_has_every_number_of_every_measure():
    numbers = [number for one in measures.MEASURES for number in one.numbers]
    row = measures.Schedule("fcfs", simulated([job(0, 10)]), 8).row()
    assert ["policy", *(name for name, _, _ in numbers), "starts_sha"] == list(row)


def test_a_schedule_without_places_has_no_measures_over_time():
    jobs = [job(0, 100)]
    bare = planner_run.run(jobs, cluster.nodes_of("1x4"), policies.rules_of("fcfs").settings())
    made = measures.Schedule("fcfs", bare, 4).document()
    assert (made["fragmentation"], made["finish_time_fairness"], made["late"], made["overdue"]) == (None,) * 4
    assert (made["wait_s"]["mean"], made["users"][0]["dominant_share"]) == (0, None)
    row = measures.Schedule("fcfs", bare, 4).row()
    assert (row["fragmentation"], row["finish_time_fairness_mean"], row["late_missed"]) == (None, None, None)


def test_the_rows_of_all_schedules_have_the_same_columns():
    jobs = [job(0, 100)]
    bare = planner_run.run(jobs, cluster.nodes_of("1x4"), policies.rules_of("fcfs").settings())
    full = measures.Schedule("a", simulated([job(0, 9, deadline_s=3)]), 8, wait_bound_s=1).row()
    assert list(full) == list(measures.Schedule("b", bare, 4).row())
    assert (full["overdue_missed"], full["overdue_by_s"], full["late_missed"], full["late_bound_s"]) == (1, 6, 0, 1)


def test_jobs_beyond_the_wait_bound_are_counted():
    jobs = [job(0, 100, 4), job(0, 10, 4), job(10, 10, 4)]
    outcome = Outcome(jobs, [0, 100, 110], 3)

    def late(bound_s):
        return measures.Schedule("a", outcome, 4, wait_bound_s=bound_s).late

    assert late(99) == {"jobs": 3, "missed": 2, "by_s": 1, "part": pytest.approx(2 / 3), "bound_s": 99}
    assert late(100)["part"] == 0
    assert late(0)["part"] == pytest.approx(2 / 3)


def test_jobs_beyond_their_deadline_are_counted():
    jobs = [job(0, 100, deadline_s=100), job(0, 10, deadline_s=100), job(0, 10)]
    assert measures.Schedule("a", Outcome(jobs, [0, 95, 105], 3), 1).overdue == {
        "jobs": 2,
        "missed": 1,
        "by_s": 5,
        "part": 0.5,
    }
    assert measures.Schedule("a", Outcome(jobs[2:], [500], 1), 1).overdue is None


def test_preempted_work_is_counted():
    # Two GPUs for 40 s, ended to make room, and again for 100 s from 60 on.
    jobs = [job(0, 100, 2), job(40, 20, 4)]
    attempts = [Attempt(0, 0, 40, "preempted"), Attempt(1, 40, 60, "completed"), Attempt(0, 60, 160, "completed")]
    made = measures.Schedule("a", Outcome(jobs, [0, 40], 3, [160, 60], attempts), 4)
    assert (made.preemptions, made.preempted_gpu_s) == (1, 80)
    assert made.utilisation == (2 * 40 + 4 * 20 + 2 * 100) / (4 * 160)
    # It waited for nothing at first, and 60 s beyond its 100 in all.
    assert (made.wait_s.most, made.completion_s.most, made.slowdown.most) == (0, 160, 1.6)


def test_a_slice_counts_as_a_part_of_the_gpu():
    made = measures.Schedule("a", Outcome([job(0, 100, gpu_fraction=0.25)], [0], 1), 1)
    assert made.utilisation == 0.25


def test_mean_wait_and_slowdown_are_given_per_user_and_queue():
    jobs = [job(0, 10, queue="q"), job(0, 10, queue="r"), job(0, 20, user="bob", queue="q")]
    outcome = Outcome(jobs, [0, 10, 20], 3)
    assert groups(outcome, lambda one: one.user) == {
        "ann": Group(2, 5, 1.5),
        "bob": Group(1, 20, 2),
    }
    assert groups(outcome, lambda one: one.queue)["q"] == Group(2, 10, 1.5)


def test_the_sentence_counts_jobs_and_names_the_largest_user():
    jobs = [job(0, 10), job(0, 10), job(0, 10, user="bob"), job(0, 10, user="eve")]
    before, after = Outcome(jobs, [0, 0, 30, 10], 4), Outcome(jobs, [10, 10, 0, 10], 4)
    assert str(compare_users("old", before, "new", after)) == (
        "new instead of old: of 3 users 1 gains (25% of the jobs; most of all user bob with 1 job, mean slowdown 4.00 "
        "to 1.00), 1 loses (50% of the jobs; most of all user ann with 2 jobs, mean slowdown 1.00 to 2.00), "
        "1 sees no difference"
    )


def test_a_trifle_is_not_a_gain():
    jobs = [job(0, 1000), job(0, 1000, user="bob")]
    found = compare_users("old", Outcome(jobs, [0, 0], 2), "new", Outcome(jobs, [9, 10], 2))
    assert str(found) == "new instead of old: of 2 users 0 gain, 0 lose, 2 see no difference"
    assert len(compare_users("old", Outcome(jobs, [0, 0], 2), "new", Outcome(jobs, [9, 11], 2)).losers) == 1


def test_queues_replace_unknown_users():
    jobs = [job(0, 10, user="", queue=""), job(0, 10, user="", queue="vision")]
    found = compare_users("old", Outcome(jobs, [10, 0], 2), "new", Outcome(jobs, [0, 10], 2))
    assert "of 2 queues 1 gains (50% of the jobs; most of all those without a queue with 1 job" in str(found)


def test_lines_without_information_are_omitted():
    alone = dict(
        one[:2] for one in measures.detail_lines([measures.Schedule("fcfs", simulated([job(0, 100), job(0, 5)]), 8)])
    )
    assert alone["jobs"] == "2"
    assert not {title for title in alone if "fairness" in title or "preempted" in title or "deadline" in title}
    assert "nodes, spread of their use" in alone
    one_node = measures.detail_lines([measures.Schedule("fcfs", simulated([job(0, 100)], shape="1x4"), 4)])
    assert not {title for title, _ in one_node if title.startswith("nodes")}
    jobs = [job(0, 40, 2, deadline_s=10), job(40, 20, 4, "bob")]
    attempts = [Attempt(0, 0, 40, "preempted"), Attempt(1, 40, 60, "completed"), Attempt(0, 60, 100, "completed")]
    told = measures.detail_lines(
        [measures.Schedule("a", Outcome(jobs, [0, 40], 3, [100, 60], attempts), 4, wait_bound_s=0)]
    )
    assert [line for line in told if line[0] in ("runs preempted", "missed", "GPU time of those")] == [
        ["runs preempted", "1"],
        ["GPU time of those", "1:20"],
        ["missed", "1"],
    ]


def test_a_custom_table_may_name_users_and_deadlines(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text("submit_s,duration_s,num_gpus,user,queue,deadline_s\n0,10,1,ann,vision,60\n5,10,1,bob,,\n")
    ann, bob = read_trace(path).jobs
    assert (ann.user, ann.queue, ann.deadline_s) == ("ann", "vision", 60)
    assert (bob.user, bob.queue, bob.deadline_s) == ("bob", "", None)
