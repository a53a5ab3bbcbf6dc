"""Arrays on a scheduler that is turned by hand: one row until a task splits off, and what becomes of all of them."""

from __future__ import annotations

from typing import Any

import pytest
from lab import ANN, BOB, ROOT, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.errors import Forbidden, GpuschedError, Refused
from gpusched.lifecycle import arrays
from gpusched.model.commands import Caller, Cancel, Hold, Release, Requeue, Selection, Suspend, Update
from gpusched.model.job import ArraySpec, Job, RetryRule
from gpusched.model.mentions import render, render_value
from gpusched.model.queue_settings import QueueSettings
from gpusched.model.settings import LimitSettings
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.value import replace
from gpusched.ports import JobFilter
from gpusched.testing import request

PENDING, RUNNING, COMPLETED, FAILED, CANCELLED = (
    JobState.PENDING,
    JobState.RUNNING,
    JobState.COMPLETED,
    JobState.FAILED,
    JobState.CANCELLED,
)


def submit(lab: Lab, tasks: str = "0-9", throttle: int | None = None, **parts: Any) -> int:
    spec = ArraySpec(tasks, throttle, parts.pop("max_fails", None), parts.pop("sweep", ()))
    return lab.submit(array=spec, **parts)


def rows(lab: Lab, array_id: int) -> dict[int, Job]:
    """The tasks that have rows, by number."""
    return {job.task: job for job in lab.store.jobs(JobFilter(arrays=frozenset({array_id}))) if job.task is not None}


def states(lab: Lab, array_id: int) -> dict[int, JobState]:
    return {number: job.state for number, job in rows(lab, array_id).items()}


def ask(lab: Lab, command: Any) -> Any:
    (answer,) = lab.ask(command)
    if isinstance(answer, GpuschedError):
        raise answer
    return answer


def run_out(lab: Lab, turns: int = 200) -> None:
    for _ in range(turns):
        if not lab.scheduler.state.jobs:
            return
        lab.tick(11)
    raise AssertionError(list(lab.scheduler.state.jobs.values()))


# --- starting ---------------------------------------------------------------------------------------


def test_a_task_gets_a_row_only_when_it_starts() -> None:
    lab = Lab(cpus=3)
    array = submit(lab)
    assert states(lab, array) == {0: RUNNING, 1: RUNNING, 2: RUNNING}
    row = lab.job(array)
    assert (row.state, row.tasks_left, row.run) == (PENDING, "3-9", 0)
    assert [job.id - array for job in rows(lab, array).values()] == [1, 2, 3]
    assert rows(lab, array)[2].shown_id == f"{array}_2"


def test_a_key_names_the_array_also_while_its_tasks_get_rows() -> None:
    lab = Lab()
    array = submit(lab, "0-2", key="k", hold=True)
    repeated = lab.submission(key="k", hold=True, array=lab.job(array).spec.array)
    update, again = lab.ask(Update(ANN, (array + 1,), {"nice": 5}), repeated)
    assert array + 1 in lab.scheduler.state.jobs, update
    assert again["ids"] == [array]


def test_the_next_job_follows_the_ids_of_all_tasks_also_after_a_restart() -> None:
    lab = Lab(cpus=1)
    array = submit(lab, "0-9")
    lab.restart()
    assert lab.submit() == array + 11


def test_ten_thousand_tasks_are_one_row() -> None:
    lab = Lab(cpus=2)
    array = submit(lab, "0-9999")
    assert len(lab.store.jobs(JobFilter())) == 3
    assert len(lab.scheduler.state.jobs) == 3
    assert lab.scheduler.state.counts()["pending"] == 9998
    assert lab.job(array).tasks_left == "2-9999"


def test_all_tasks_run_and_the_array_completes() -> None:
    lab = Lab(cpus=4)
    array = submit(lab, "1-9:2")
    lab.tick(1)
    lab.tick(11)
    assert lab.job(array).state is RUNNING
    run_out(lab)
    assert states(lab, array) == dict.fromkeys((1, 3, 5, 7, 9), COMPLETED)
    row = lab.job(array)
    assert (row.state, row.exit_code, row.tasks_left, row.reason_text) == (COMPLETED, 0, "", "5 COMPLETED")


def test_running_tasks_do_not_exceed_the_throttle() -> None:
    lab = Lab(cpus=8)
    array = submit(lab, "0-9", throttle=2)
    assert states(lab, array) == {0: RUNNING, 1: RUNNING}
    reason = lab.scheduler.answers.reason_for(lab.job(array))
    assert reason is not None
    assert reason.code is ReasonCode.JOB_ARRAY_TASK_LIMIT
    assert reason.text == f"array {array} may run 2 tasks at once"
    lab.tick(11)
    assert states(lab, array) == {0: COMPLETED, 1: COMPLETED, 2: RUNNING, 3: RUNNING}


def test_a_throttled_array_blocks_no_other_job() -> None:
    lab = Lab(cpus=2)
    submit(lab, "0-9", throttle=1)
    assert lab.job(lab.submit()).state is RUNNING


def test_the_throttle_changes_while_the_array_runs() -> None:
    lab = Lab(cpus=8)
    array = submit(lab, "0-9", throttle=1)
    assert ask(lab, Update(ANN, (array,), {"throttle": 3})) == {"changed": [str(array)]}
    assert len(states(lab, array)) == 3
    ask(lab, Update(ANN, (array,), {"throttle": None}))
    assert len(states(lab, array)) == 8
    with pytest.raises(Refused, match="is not an array"):
        ask(lab, Update(ANN, (lab.submit(),), {"throttle": 3}))


def test_a_retry_counts_against_the_throttle_and_precedes_later_tasks() -> None:
    lab = Lab(cpus=8, outcome=SimulatedOutcome(runs_s=1, exit_code=1))
    array = submit(lab, "0-3", throttle=1, retry=RetryRule(retries=1, backoff_s=0.0))
    for _ in range(3):
        lab.tick(2)
        running = [number for number, job in rows(lab, array).items() if job.state is RUNNING]
        assert len(running) <= 1
    assert rows(lab, array)[0].run == 2
    run_out(lab)
    assert {job.run for job in rows(lab, array).values()} == {2}
    assert lab.job(array).state is FAILED


def test_a_restart_midway_loses_and_doubles_nothing() -> None:
    lab = Lab(cpus=2)
    array = submit(lab, "0-7", throttle=2)
    for _ in range(30):
        lab.restart()
        lab.tick(6)
        if not lab.scheduler.state.jobs:
            break
    assert states(lab, array) == dict.fromkeys(range(8), COMPLETED)
    assert {job.run for job in rows(lab, array).values()} == {1}
    assert lab.job(array).reason_text == "8 COMPLETED"


# --- how an array ends --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "limit_s", "state"),
    [
        (SimulatedOutcome(runs_s=1, exit_code=3), None, FAILED),
        (SimulatedOutcome(runs_s=99), 5, JobState.TIMEOUT),
        (SimulatedOutcome(runs_s=1, gpu_oom=True, exit_code=1), None, JobState.OUT_OF_MEMORY),
    ],
)
def test_an_array_of_failures_ends_like_its_tasks(
    outcome: SimulatedOutcome, limit_s: int | None, state: JobState
) -> None:
    lab = Lab(cpus=8, outcome=outcome)
    array = submit(lab, "0-3", time_limit_s=limit_s)
    run_out(lab)
    row = lab.job(array)
    assert (row.state, row.reason, row.reason_text) == (state, ReasonCode.TASK_FAILED, f"4 {state}")
    assert row.exit_code == outcome.exit_code or limit_s


def test_more_failures_than_allowed_stop_the_rest() -> None:
    lab = Lab(cpus=2, outcome=SimulatedOutcome(runs_s=5, exit_code=7))
    array = submit(lab, "0-99", max_fails=2)
    run_out(lab)
    row = lab.job(array)
    assert (row.state, row.reason, row.exit_code) == (FAILED, ReasonCode.MAX_FAILS, 7)
    assert row.reason_text is not None
    assert row.reason_text.startswith("4 of its tasks failed, and --max-fails is 2 (4 FAILED")
    assert row.tasks_left == "4-99"


def test_too_many_failures_cancel_running_tasks_too() -> None:
    lab = Lab(cpus=3, outcome=SimulatedOutcome(runs_s=500))
    lab.outcomes["2.1"] = SimulatedOutcome(runs_s=1, exit_code=1)
    array = submit(lab, "0-9", max_fails=0)
    lab.tick(2)
    lab.tick(2)
    lab.tick(2)
    assert states(lab, array) == {0: FAILED, 1: CANCELLED, 2: CANCELLED}
    assert lab.job(array).state is FAILED


def test_a_dependant_of_an_array_waits_for_all_of_its_tasks() -> None:
    lab = Lab(cpus=2)
    array = submit(lab, "0-3")
    after = lab.submit(dependency=f"afterok:{array}")
    lab.tick(11)
    assert lab.job(after).state is PENDING
    lab.tick(11)
    lab.tick(1)
    assert lab.job(array).state is COMPLETED
    assert lab.job(after).state is RUNNING


def test_a_dependant_of_one_task_waits_for_that_task_alone() -> None:
    lab = Lab(cpus=1)
    array = submit(lab, "0-9")
    after = lab.submit(caller=ROOT, dependency=f"afterok:{array + 2}", nice=-100)
    lab.tick(11)
    assert lab.job(after).state is PENDING
    lab.tick(11)
    assert lab.job(after).state is RUNNING
    assert set(states(lab, array)) == {0, 1}


def test_a_task_that_never_starts_notifies_its_dependants() -> None:
    lab = Lab(cpus=1)
    array = submit(lab, "0-9")
    after = lab.submit(dependency=f"afterok:{array + 8}")
    later = lab.submit(dependency=f"afterany:{array + 9}")
    ask(lab, Cancel(ANN, Selection(ids=(array,))))
    lab.tick(1)
    assert lab.job(after).state is CANCELLED
    assert lab.job(later).state in (PENDING, RUNNING)
    run_out(lab)
    assert lab.job(later).state is COMPLETED


def test_an_array_waits_for_its_dependency_as_one() -> None:
    lab = Lab(cpus=4)
    first = lab.submit()
    array = submit(lab, "0-3", dependency=f"afterok:{first}")
    assert states(lab, array) == {}
    lab.tick(11)
    assert len(states(lab, array)) == 4


def test_an_array_whose_parent_failed_is_cancelled_whole() -> None:
    lab = Lab(cpus=4, outcome=SimulatedOutcome(runs_s=1, exit_code=1))
    first = lab.submit()
    array = submit(lab, "0-3", dependency=f"afterok:{first}")
    lab.tick(2)
    row = lab.job(array)
    assert (row.state, row.reason) == (CANCELLED, ReasonCode.DEPENDENCY_NEVER_SATISFIED)
    assert row.tasks_left == "0-3"
    assert not lab.scheduler.state.jobs


def test_an_array_that_misses_its_deadline_ends() -> None:
    lab = Lab(cpus=1)
    array = submit(lab, "0-9", time_limit_s=20, deadline_at=lab.clock.now() + 35)
    lab.tick(11)
    lab.tick(11)
    lab.tick(11)
    row = lab.job(array)
    assert (row.state, row.reason) == (JobState.DEADLINE, ReasonCode.DEADLINE)
    assert set(states(lab, array).values()) == {COMPLETED}


# --- what is done to arrays and tasks -----------------------------------------------------------------


def test_cancelling_an_array_ends_all_of_it() -> None:
    lab = Lab(cpus=2)
    array = submit(lab)
    answer = ask(lab, Cancel(ANN, Selection(ids=(array,))))
    assert answer["cancelled"] == [str(array)]
    lab.tick(1)
    row = lab.job(array)
    assert states(lab, array) == {0: CANCELLED, 1: CANCELLED}
    assert (row.state, row.tasks_left) == (CANCELLED, "2-9")
    assert row.reason_text == "cancelled by ann (2 CANCELLED, 8 never started)"
    assert not lab.scheduler.state.jobs


def test_cancelling_some_tasks_leaves_the_others() -> None:
    lab = Lab(cpus=1)
    array = submit(lab, "0-9")
    answer = ask(lab, Cancel(ANN, Selection(ids=tuple(array + 1 + number for number in (0, 4, 5)))))
    assert answer["cancelled"] == [f"{array}_0", f"{array}_4", f"{array}_5"]
    lab.tick(1)
    assert states(lab, array) == {0: CANCELLED, 1: RUNNING, 4: CANCELLED, 5: CANCELLED}
    assert lab.job(array).tasks_left == "2-3,6-9"
    run_out(lab)
    row = lab.job(array)
    assert (row.state, row.reason_text) == (CANCELLED, "7 COMPLETED, 3 CANCELLED")


def test_cancelling_tasks_one_by_one_ends_the_array() -> None:
    lab = Lab(cpus=1)
    array = submit(lab, "0-2", hold=True)
    ask(lab, Cancel(ANN, Selection(ids=(array + 1, array + 2, array + 3))))
    assert lab.job(array).state is CANCELLED


def test_a_filter_cancels_an_array_once() -> None:
    lab = Lab(cpus=2)
    array = submit(lab)
    assert ask(lab, Cancel(ANN, Selection(everything=True)))["cancelled"] == [str(array)]
    lab.tick(1)
    assert not lab.scheduler.state.jobs


def test_a_state_filter_names_single_tasks() -> None:
    lab = Lab(cpus=1)
    array = submit(lab)
    answer = ask(lab, Cancel(ANN, Selection(states=frozenset({RUNNING}))))
    assert answer["cancelled"] == [f"{array}_0"]
    assert lab.job(array).state is PENDING


def test_a_signal_reaches_the_running_tasks() -> None:
    lab = Lab(cpus=2)
    array = submit(lab)
    assert ask(lab, Cancel(ANN, Selection(ids=(array,)), signal=10))["signalled"] == [f"{array}_0", f"{array}_1"]
    held = submit(lab, hold=True)
    with pytest.raises(Refused, match=f"no task of array {held} is running"):
        ask(lab, Cancel(ANN, Selection(ids=(held,)), signal=10))


def test_one_task_is_held_and_released() -> None:
    lab = Lab(cpus=1)
    array = submit(lab, "0-2")
    assert ask(lab, Hold(ANN, (array + 2,)))["changed"] == [f"{array}_1"]
    assert lab.job(array).tasks_left == "2"
    lab.tick(11)
    assert states(lab, array) == {0: COMPLETED, 1: PENDING, 2: RUNNING}
    ask(lab, Release(ANN, (array + 2,)))
    run_out(lab)
    assert lab.job(array).state is COMPLETED


def test_a_held_array_starts_no_task_until_released() -> None:
    lab = Lab(cpus=1)
    array = submit(lab, "0-2")
    ask(lab, Hold(ANN, (array,)))
    lab.tick(11)
    assert states(lab, array) == {0: COMPLETED}
    ask(lab, Release(ANN, (array,)))
    run_out(lab)
    assert lab.job(array).state is COMPLETED


def test_an_update_applies_to_tasks_that_have_not_started() -> None:
    lab = Lab(cpus=2)
    array = submit(lab, "0-3")
    ask(lab, Update(ANN, (array,), {"queue": "q"}))
    assert [job.spec.queue for job in rows(lab, array).values()] == ["default", "default"]
    lab.tick(11)
    assert [job.spec.queue for job in rows(lab, array).values()] == ["default", "default", "q", "q"]


def test_running_tasks_are_requeued_and_suspended_by_the_array_id() -> None:
    lab = Lab(cpus=2)
    array = submit(lab, "0-3")
    lab.tick(1)
    assert ask(lab, Suspend(ANN, (array,)))["changed"] == [f"{array}_0", f"{array}_1"]
    assert ask(lab, Requeue(ANN, (array,)))["changed"] == [f"{array}_0", f"{array}_1"]
    with pytest.raises(Refused, match="no task of array"):
        ask(lab, Requeue(ANN, (submit(lab, hold=True),)))


def test_users_cannot_change_tasks_of_others() -> None:
    lab = Lab(cpus=1)
    array = submit(lab)
    for ids in ((array,), (array + 1,), (array + 5,)):
        for command in (Cancel(BOB, Selection(ids=ids)), Hold(BOB, ids), Update(BOB, ids, {"nice": 5})):
            with pytest.raises(Forbidden, match="belongs to ann"):
                ask(lab, command)
    assert lab.job(array).tasks_left == "1-9"


# --- limits, names, sweeps ------------------------------------------------------------------------------


def test_each_task_counts_against_the_limits_on_jobs() -> None:
    lab = Lab(cpus=1, queue={"q": QueueSettings("q", max_jobs=10)})
    submit(lab, "0-7", queue="q")
    with pytest.raises(Refused, match="only 2 of these 3 jobs would be accepted"):
        submit(lab, "0-2", queue="q")
    submit(lab, "0-1", queue="q")
    lab.tick(11)
    lab.tick(1)
    submit(lab, "0", queue="q")


def test_an_oversized_array_is_refused() -> None:
    lab = Lab(limit=LimitSettings(array=10))
    submit(lab, "0-9")
    with pytest.raises(Refused, match="the array has 11 tasks; the limit is 10"):
        submit(lab, "0-10")


SWEEP = (("lr", ("1e-3", "1e-4")), ("seed", ("0", "1", "2")))


def test_a_sweep_has_a_task_for_every_combination() -> None:
    lab = Lab(cpus=8)
    array = submit(lab, "0-5", sweep=SWEEP, name="train")
    assert [job.spec.name for job in rows(lab, array).values()] == [
        "train lr=1e-3 seed=0",
        "train lr=1e-3 seed=1",
        "train lr=1e-3 seed=2",
        "train lr=1e-4 seed=0",
        "train lr=1e-4 seed=1",
        "train lr=1e-4 seed=2",
    ]
    named = submit(lab, "0-5", sweep=SWEEP, name="t{seed}-{other}")
    run_out(lab)
    assert rows(lab, named)[4].spec.name == "t1-{other}"


def test_placeholders_are_expanded_once() -> None:
    values = arrays.swept(replace(ArraySpec("0"), sweep=SWEEP), 5)
    assert values == {"lr": "1e-4", "seed": "2"}
    assert arrays.fill("--lr={lr} ${seed} {x} {{lr}}", values) == "--lr=1e-4 ${seed} {x} {1e-4}"


def test_a_refused_array_leaves_no_trace() -> None:
    lab = Lab(cpus=1, queue={"q": QueueSettings("q", max_jobs_per_user=2)})
    (answer,) = lab.ask(lab.submission(Caller(1001, "ann"), array=ArraySpec("0-5"), queue="q"))
    assert isinstance(answer, Refused)
    assert lab.store.jobs(JobFilter()) == []
    assert lab.submit(request=request(), queue="q") == 1


# --- task by task -------------------------------------------------------------------------------------


def test_each_task_waits_for_the_task_of_the_same_number() -> None:
    lab = Lab(cpus=1)
    first = submit(lab, "0-2")
    second = submit(lab, "0-2", dependency=f"aftercorr:{first}", nice=-100, caller=ROOT)
    reason = lab.scheduler.answers.reason_for(lab.job(second))
    assert reason is not None
    assert reason.text == "waits for the corresponding tasks to complete"
    lab.tick(11)
    assert (states(lab, first), states(lab, second)) == ({0: COMPLETED}, {0: RUNNING})
    run_out(lab)
    assert lab.job(second).reason_text == "3 COMPLETED"


def test_only_the_counterpart_of_a_failed_task_is_cancelled() -> None:
    lab = Lab(cpus=4)
    lab.outcomes["3.1"] = SimulatedOutcome(runs_s=1, exit_code=1)
    first = submit(lab, "0-3")
    second = submit(lab, "0-3", dependency=f"aftercorr:{first}")
    lab.tick(2)
    assert states(lab, second) == {1: CANCELLED}
    assert rows(lab, second)[1].reason_text == f"depends on the success of task {first}_1, which did not complete"
    lab.restart()
    run_out(lab)
    assert states(lab, second) == {0: COMPLETED, 1: CANCELLED, 2: COMPLETED, 3: COMPLETED}
    # It said that a user had cancelled it.
    ended = lab.job(second)
    assert (ended.state, ended.reason) == (CANCELLED, ReasonCode.DEPENDENCY_NEVER_SATISFIED)
    third = submit(lab, "0-1", dependency=f"aftercorr:{first}", hold=True)
    ask(lab, Cancel(ANN, Selection(ids=(third + 1,))))
    assert states(lab, third) == {0: CANCELLED, 1: CANCELLED}
    assert lab.job(third).reason is ReasonCode.CANCELLED_BY_USER


def test_counterparts_of_unstarted_tasks_are_cancelled_and_of_ended_ones_start_at_once() -> None:
    lab = Lab(cpus=1)
    first = submit(lab, "0-2")
    lab.tick(11)
    ask(lab, Cancel(ANN, Selection(ids=(first,))))
    second = submit(lab, "0-2", dependency=f"aftercorr:{first}")
    run_out(lab)
    assert states(lab, second) == {0: COMPLETED, 1: CANCELLED, 2: CANCELLED}


def test_a_task_without_a_counterpart_waits_for_the_whole_array() -> None:
    lab = Lab(cpus=1)
    first = submit(lab, "0-1")
    second = submit(lab, "1-2", dependency=f"aftercorr:{first}", nice=-100, caller=ROOT)
    lab.tick(11)
    assert (states(lab, first), states(lab, second)) == ({0: COMPLETED, 1: RUNNING}, {})
    run_out(lab)
    assert states(lab, second) == {1: COMPLETED, 2: COMPLETED}


def test_an_array_after_a_plain_job_waits_for_that() -> None:
    lab = Lab(cpus=2)
    first = lab.submit()
    second = submit(lab, "0-1", dependency=f"aftercorr:{first}")
    assert states(lab, second) == {}
    run_out(lab)
    assert lab.job(second).state is COMPLETED


def test_arrays_of_one_name_run_in_sequence() -> None:
    lab = Lab(cpus=8)
    first = submit(lab, "0-1", name="x", dependency="singleton")
    second = submit(lab, "0-1", name="x", dependency="singleton", retry=RetryRule(retries=1, backoff_s=0.0))
    assert (len(states(lab, first)), len(states(lab, second))) == (2, 0)
    ask(lab, Hold(ANN, (second + 1,)))
    lab.outcomes[f"{second + 2}.1"] = SimulatedOutcome(runs_s=1, exit_code=1)
    lab.tick(11)
    lab.tick(2)
    ask(lab, Release(ANN, (second + 1,)))
    run_out(lab)
    assert states(lab, second) == {0: COMPLETED, 1: COMPLETED}
    assert rows(lab, second)[1].run == 2


def reason_text(lab: Lab, job_id: int) -> str:
    reason = lab.scheduler.answers.reason_for(lab.scheduler.state.jobs[job_id])
    assert reason is not None
    return render(reason.text)


def test_a_task_in_the_way_is_shown_by_its_display_id() -> None:
    lab = Lab(gpus=1)
    array = submit(lab, "7-8", request=request(gpus=1))
    other = lab.submit(request=request(gpus=1, gpu_type="A100"))
    assert f"when job {array}_7 ends" in reason_text(lab, array)
    assert f"job {array}_8, which needs 1 GPU, goes first" in reason_text(lab, other)
    reason_for = lab.scheduler.answers.reason_for
    facts = reason_for(lab.job(array)).facts, reason_for(lab.job(other)).facts  # type: ignore[union-attr]
    assert (render_value(facts[0]["jobs"]), render(facts[1]["behind"])) == ([f"{array}_7"], f"{array}_8")


def test_equal_jobs_wait_for_the_same_license_and_not_for_each_other() -> None:
    lab = Lab(license={"matlab": 1})
    first, second, third = (lab.submit(request=request(licenses=(("matlab", 1),))) for _ in range(3))
    lab.tick()
    codes = [lab.scheduler.answers.reason_for(lab.job(job_id)).code for job_id in (second, third)]  # type: ignore[union-attr]
    assert codes == [ReasonCode.LICENSES, ReasonCode.LICENSES]
    assert lab.scheduler.state.waiting_reasons(lab.scheduler.plan.reasons) == {ReasonCode.LICENSES: 2}
    assert f"in use by job {first} of ann" in reason_text(lab, third)


def test_a_task_without_a_row_waits_like_its_array() -> None:
    lab = Lab()
    parent = lab.submit()
    array = submit(lab, "0-3", dependency=f"afterok:{parent}")
    task = lab.scheduler.state.find(array + 2)
    assert task is not None
    reason = lab.scheduler.answers.reason_for(task)
    assert reason is not None
    assert (reason.code, render(reason.text)) == (ReasonCode.DEPENDENCY, f"waits for job {parent} to complete")
