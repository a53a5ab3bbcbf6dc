"""Traces are cut into cases at the loads that are asked for, and disturbed replays are like the recording."""

from __future__ import annotations

import pytest

from benchmarks import cases
from gpusched.addons.simulate.trace import Trace, TraceJob
from gpusched.errors import UsageError

DAY_S = 86400


def job(number, submit_s, run_s=3600, gpus=1, queue="", estimate_s=None):
    return TraceJob(str(number), submit_s, run_s, estimate_s or run_s, gpus=gpus, queue=queue)


def stream(queue, count, span_s, gpus=1):
    """Jobs of one queue that keep this many GPUs busy on average."""
    run_s = gpus * span_s // count
    return [job(f"{queue}{number}", number * span_s // count, run_s, queue=queue) for number in range(count)]


def load_of(case):
    span_s = max(job.submit_s for job in case.jobs)
    return sum(job.run_s * job.gpus for job in case.jobs) / span_s / sum(len(node.gpus) for node in case.nodes)


def test_each_queue_with_enough_jobs_becomes_a_case_at_every_load():
    span_s = 10 * DAY_S
    trace = Trace("log.csv", [*stream("large", 600, span_s, 40), *stream("small", 100, span_s, 40)])
    found = list(cases.cut(trace))
    assert [case.name for case in found] == ["log large @6x8", "log large @7x8", "log large @10x8"]
    assert [load_of(case) for case in found] == pytest.approx([0.85, 0.7, 0.5], abs=0.05)
    assert all(job.queue == "large" for case in found for job in case.jobs)


def test_a_log_of_months_is_also_split_by_month_with_all_queues():
    span_s = 60 * DAY_S
    trace = Trace("log.csv", [*stream("a", 3000, span_s, 40), *stream("b", 3000, span_s, 40)])
    months = [case for case in cases.cut(trace) if "month" in case.name]
    assert {case.name.partition(" @")[0] for case in months} == {"log month 1", "log month 2"}
    for case in months:
        assert {job.queue for job in case.jobs} == {"a", "b"}
        assert min(job.submit_s for job in case.jobs) == 0
        assert max(job.submit_s for job in case.jobs) < 30 * DAY_S
        assert load_of(case) == pytest.approx(0.7, abs=0.15)


def test_a_log_of_one_queue_also_runs_on_a_cluster_that_is_too_small():
    found = list(cases.cut(Trace("log.csv", stream("", 600, DAY_S, 40))))
    assert [load_of(case) for case in found] == pytest.approx([1.5, 0.85], abs=0.2)


def test_no_cluster_is_smaller_than_the_widest_job():
    wide = [*stream("", 600, DAY_S, 20), job("wide", 0, gpus=64)]
    (case,) = cases.cut(Trace("log.csv", wide))
    assert len(case.nodes) == 8


def test_a_log_of_processors_loses_its_estimates():
    jobs = [TraceJob(str(number), number * 60, 100, 9000, procs=4, user="ann") for number in range(20)]
    (case,) = cases.cut(Trace("log.swf", jobs, procs=16))
    assert case.name == "log without estimates"
    assert case.nodes[0].cpus == 16
    assert all(job.estimate_s == job.run_s == 100 for job in case.jobs)


def test_a_perturbed_replay_resembles_the_recording_and_is_deterministic():
    jobs = [job(number, 10_000 + 60 * number, 1000, estimate_s=1500) for number in range(3000)]
    found = cases.disturbed(jobs, "seed")
    assert found == cases.disturbed(jobs, "seed") != cases.disturbed(jobs, "another")
    assert 1 - len(found) / len(jobs) == pytest.approx(0.02, abs=0.01)
    assert found == sorted(found, key=lambda one: one.submit_s)
    known = {one.id: one for one in jobs}
    for one in found:
        assert abs(one.submit_s - known[one.id].submit_s) <= 300
        assert 900 <= one.run_s <= 1100
        assert one.estimate_s == pytest.approx(1.5 * one.run_s, abs=2)
    assert len({one.run_s for one in found}) > 100


def test_a_folder_without_traces_is_refused(tmp_path):
    with pytest.raises(UsageError, match="holds no traces"):
        list(cases.cases_of(tmp_path))
