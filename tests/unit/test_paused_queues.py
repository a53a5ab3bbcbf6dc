"""Paused queues: nothing new starts from them, nothing is taken for their jobs, and a restart changes nothing."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import pytest
from lab import ANN, BOB, Lab
from memory import check_memory

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon.facade import DaemonFacade
from gpusched.errors import Forbidden, NotFound, Refused
from gpusched.model.commands import Caller, Command, PauseQueue, Reload, Requeue, UndoTableSettings
from gpusched.model.job import ArraySpec
from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.queue_settings import QosSettings, QueueSettings
from gpusched.model.settings import PreemptSettings
from gpusched.model.spec import JobSpec
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.table_settings import QueuePause
from gpusched.model.value import replace
from gpusched.ports.tables import FENCES, TABLE_SETTINGS
from gpusched.testing import request

ADMIN = Caller(os.geteuid(), "root")
QUEUES = {
    "default": QueueSettings("default"),
    "lab": QueueSettings("lab", operators=("bob",)),
    "fast": QueueSettings("fast", parent="lab"),
    "slow": QueueSettings("slow", parent="lab"),
}
PENDING, RUNNING = JobState.PENDING, JobState.RUNNING


def lab_of(gpus: int = 2, **sections: Any) -> Lab:
    return Lab(gpus=gpus, outcome=SimulatedOutcome(runs_s=1e6), **{"queue": QUEUES, **sections})


def ok(answer: Any) -> dict[str, Any]:
    if isinstance(answer, Exception):
        raise answer
    return dict(answer)


def pause(lab: Lab, queue: str, message: str = "", caller: Caller = ADMIN) -> dict[str, Any]:
    return ok(lab.ask(PauseQueue(caller, queue, message))[0])


def resume(lab: Lab, queue: str, caller: Caller = ADMIN) -> dict[str, Any]:
    return ok(lab.ask(PauseQueue(caller, queue, is_resumed=True))[0])


def states(lab: Lab, *ids: int) -> list[JobState]:
    lab.tick()
    return [lab.job(one).state for one in ids]


def code(lab: Lab, job_id: int) -> ReasonCode:
    job = lab.scheduler.state.find(job_id) or lab.job(job_id)
    reason = lab.scheduler.answers.reason_for(job)
    assert reason is not None
    assert lab.scheduler.answers.reason_codes()(job) is reason.code
    return reason.code


def test_nothing_new_starts_and_what_runs_goes_on() -> None:
    lab = lab_of(gpus=4)
    runs = lab.submit(queue="fast", request=request(gpus=1))
    pause(lab, "lab", "new disks")
    waits = [lab.submit(queue=queue, request=request(gpus=1)) for queue in ("slow", "fast")]
    other = lab.submit(queue="default", request=request(gpus=1))
    assert states(lab, runs, *waits, other) == [RUNNING, PENDING, PENDING, RUNNING]
    reasons = [lab.scheduler.answers.reason_for(lab.job(one)) for one in waits]
    assert [one and one.code for one in reasons] == [ReasonCode.PARTITION_DOWN] * 2
    first, second = (one.text for one in reasons if one)
    assert first.startswith("queue lab, above slow, has been paused by root since ")
    assert first.endswith(": new disks")
    assert second.startswith("queue lab, above fast, has been paused by root since ")
    assert lab.scheduler.state.waiting_reasons(lab.scheduler.plan.reasons) == {ReasonCode.PARTITION_DOWN: 2}
    check_memory(lab)
    resume(lab, "lab")
    assert states(lab, *waits) == [RUNNING, RUNNING]


def test_its_jobs_leave_the_line_at_once_and_others_take_what_was_reserved_for_them() -> None:
    lab = lab_of(gpus=2, priority=PrioritySettings(order="fifo"))
    lab.submit(queue="default", request=request(gpus=1), time_limit_s=3600)
    wide = lab.submit(queue="fast", request=request(gpus=2), time_limit_s=60)
    behind = lab.submit(queue="default", request=request(gpus=1), time_limit_s=36_000)
    assert states(lab, wide, behind) == [PENDING, PENDING]
    pause(lab, "fast")
    assert states(lab, wide, behind) == [PENDING, RUNNING]
    assert lab.scheduler.plan.reservations == ()
    check_memory(lab)


def test_a_fence_does_not_outlive_the_pause() -> None:
    lab = lab_of(gpus=2)
    lab.submit(queue="default", request=request(gpus=1), time_limit_s=3600)
    wide = lab.submit(queue="fast", request=request(gpus=2), time_limit_s=60)
    lab.tick()
    lab.scheduler.state.rows[FENCES][wide] = lab.clock.now()
    pause(lab, "fast")
    assert wide not in lab.scheduler.state.rows[FENCES]
    check_memory(lab)


def test_arrays_begin_times_dependencies_and_requeued_runs_wait() -> None:
    lab = lab_of(gpus=2)
    runs = lab.submit(queue="fast", request=request(gpus=1))
    lab.tick()
    pause(lab, "fast")
    array = lab.submit(queue="fast", array=ArraySpec("0-3", 2))
    later = lab.submit(queue="fast", begin_at=lab.clock.now() + 60)
    parent = lab.submit(queue="default")
    child = lab.submit(queue="fast", dependency=f"after:{parent}")
    lab.ask(Requeue(ADMIN, (runs,)))
    for _ in range(3):
        lab.tick(60)
    waiting = (array, later, child, runs)
    assert states(lab, *waiting) == [PENDING] * 4
    assert [code(lab, one) for one in waiting] == [ReasonCode.PARTITION_DOWN] * 4
    task = lab.scheduler.state.find(array + 1)
    assert task is not None
    found = lab.scheduler.answers.reason_for(task)
    assert found is not None
    assert found.code is ReasonCode.PARTITION_DOWN
    check_memory(lab)
    resume(lab, "fast")
    assert states(lab, later, child, runs) == [RUNNING] * 3


def test_nothing_is_reclaimed_or_preempted_for_it() -> None:
    queues = {
        "vision": QueueSettings("vision", guaranteed_gpus=1.0),
        "nlp": QueueSettings("nlp", guaranteed_gpus=1.0),
    }
    qos = {"low": QosSettings("low"), "high": QosSettings("high", tier=1, preempts=("low",))}
    lab = lab_of(queue=queues, qos=qos, preempt=PreemptSettings(min_run_s=0.0))
    pause(lab, "nlp")
    lent = [lab.submit(queue="vision", qos="low", request=request(gpus=1)) for _ in range(2)]
    assert states(lab, *lent) == [RUNNING] * 2
    owner = lab.submit(queue="nlp", qos="high", request=request(gpus=1))
    lab.tick(600)
    assert states(lab, *lent, owner) == [RUNNING, RUNNING, PENDING]
    assert not lab.scheduler.plan.preempts
    resume(lab, "nlp")
    assert lab.scheduler.plan.preempts
    for _ in range(3):
        lab.tick(60)
    assert states(lab, owner) == [RUNNING]


def test_a_job_that_only_waits_for_another_passes_no_urgency_on_while_paused() -> None:
    qos = {"low": QosSettings("low"), "high": QosSettings("high", tier=1)}
    lab = lab_of(gpus=0, qos=qos)
    parent = lab.submit(queue="default", qos="low", hold=True)
    child = lab.submit(queue="fast", qos="high", dependency=f"afterok:{parent}")
    state = lab.scheduler.state
    assert state.inheritance.inherited(parent) is not None
    pause(lab, "fast")
    assert state.inheritance.inherited(parent) is None
    check_memory(lab)
    resume(lab, "fast")
    assert state.inheritance.inherited(parent) is not None
    assert code(lab, child) is ReasonCode.DEPENDENCY


def test_it_survives_a_restart_and_a_reload_but_not_the_removal_of_the_queue() -> None:
    lab = lab_of()
    pause(lab, "fast", "new disks")
    waits = lab.submit(queue="fast")
    lab.restart()
    assert states(lab, waits) == [PENDING]
    lab.settings = replace(lab.settings, queue={**QUEUES, "lab": QueueSettings("lab", max_gpus=1.0)})
    lab.ask(Reload(ADMIN))
    assert states(lab, waits) == [PENDING]
    assert isinstance(lab.scheduler.state.rows[TABLE_SETTINGS]["pause", "fast"], QueuePause)
    lab.settings = replace(lab.settings, queue={"default": QUEUES["default"]})
    lab.ask(Reload(ADMIN))
    lab.tick()
    assert not lab.store.load(TABLE_SETTINGS)
    check_memory(lab)


def test_a_reload_that_moves_a_queue_below_a_paused_one_pauses_it() -> None:
    lab = lab_of(gpus=0, cpus=1)
    runs, waits = lab.submit(queue="default"), lab.submit(queue="default")
    pause(lab, "lab")
    assert states(lab, runs, waits) == [RUNNING, PENDING]
    assert code(lab, waits) is ReasonCode.RESOURCES
    below = {**QUEUES, "default": QueueSettings("default", parent="lab")}
    lab.settings = replace(lab.settings, queue=below)
    lab.ask(Reload(ADMIN))
    assert code(lab, waits) is ReasonCode.PARTITION_DOWN
    check_memory(lab)
    lab.settings = replace(lab.settings, queue=QUEUES)
    lab.ask(Reload(ADMIN))
    assert code(lab, waits) is ReasonCode.RESOURCES


def test_without_queue_settings_the_default_queue_can_be_paused() -> None:
    lab = lab_of(queue={})
    pause(lab, "default")
    assert states(lab, lab.submit()) == [PENDING]


def test_again_keeps_who_and_since_when_unless_the_message_is_new() -> None:
    lab = lab_of()
    first = pause(lab, "fast", "new disks")["pause"]
    lab.tick(60)
    for words in ("", "new disks"):
        again = pause(lab, "fast", words, BOB)
        assert (again["is_changed"], again["pause"]) == (False, first)
    other = pause(lab, "fast", "more disks", BOB)
    assert (other["is_changed"], other["pause"].by) == (True, "bob")
    assert resume(lab, "fast")["is_changed"]
    assert not resume(lab, "fast")["is_changed"]


def test_an_undo_resumes_it_and_the_record_has_it() -> None:
    lab = lab_of()
    recorded: list[tuple[str, dict[str, Any]]] = []
    lab.scheduler.signals.settings_set.connect(
        lambda settings, caller, what, table: recorded.append((what, dict(table)))
    )
    made = pause(lab, "fast", "new disks")["pause"]
    waits = lab.submit(queue="fast")
    after = {"queue": "fast", "by": "root", "at": made.at, "message": "new disks"}
    assert recorded == [("gctl queue pause", {"queue_pause": {"fast": after}})]
    ok(lab.ask(UndoTableSettings(ADMIN, 1, ((("queue_pause", "fast"), None, after),)))[0])
    assert states(lab, waits) == [RUNNING]


REFUSED: list[tuple[Callable[[Lab], Command], type[Exception]]] = [
    (lambda lab: PauseQueue(ANN, "lab"), Forbidden),
    (lambda lab: PauseQueue(BOB, "default"), Forbidden),
    (lambda lab: PauseQueue(BOB, "nowhere"), Forbidden),
    (lambda lab: PauseQueue(ADMIN, "fsat"), NotFound),
    (lambda lab: PauseQueue(ADMIN, "lab", "x" * 501), Refused),
    (lambda lab: PauseQueue(ANN, "lab", is_resumed=True), Forbidden),
    (lambda lab: (pause(lab, "lab"), PauseQueue(ADMIN, "fast", is_resumed=True))[1], Refused),
]


@pytest.mark.parametrize(("make", "error"), REFUSED)
def test_what_is_refused_says_what_to_do(make: Callable[[Lab], Command], error: type[Exception]) -> None:
    lab = lab_of()
    command = make(lab)
    before = dict(lab.scheduler.state.rows[TABLE_SETTINGS])
    (answer,) = lab.ask(command)
    assert isinstance(answer, error)
    assert answer.hint  # type: ignore[attr-defined]
    assert lab.scheduler.state.rows[TABLE_SETTINGS] == before


def test_operators_pause_and_resume_their_queue_and_those_below() -> None:
    lab = lab_of()
    assert pause(lab, "fast", caller=BOB)["pause"].by == "bob"
    assert resume(lab, "fast", BOB)["is_changed"]


def test_no_start_is_expected_of_its_jobs_nor_of_those_that_begin_later_or_wait_for_others() -> None:
    lab = lab_of(gpus=0)
    lab.submit(queue="default", time_limit_s=600)
    pause(lab, "fast")
    waiting = [
        lab.submit(queue="fast"),
        lab.submit(queue="fast", begin_at=lab.clock.now() + 60),
        lab.submit(queue="fast", dependency="afterok:1"),
    ]
    facade = DaemonFacade(lab.ticker)
    question = facade.starts([lab.job(one) for one in waiting])
    ids, look = question.ids, question.look
    found = look()
    assert [(found[ids[one]].low_at, found[ids[one]].high_at) for one in waiting] == [(None, None)] * 3
    outlook = facade.outlook(lab.job(waiting[0]))()
    assert (outlook.place, outlook.start.low_at, outlook.alternatives) == (None, None, ())
    dry = facade.forecast(lab.job(waiting[0]).spec, ANN, "never")()
    assert (dry.verdict, dry.reason, dry.start_at) == ("waits", "PartitionDown", None)


def test_whoever_submits_to_it_is_told() -> None:
    lab = lab_of()
    pause(lab, "lab", "new disks")
    (answer,) = lab.ask(lab.submission(queue="fast"))
    (note,) = answer["notes"]
    assert note.startswith("queue lab, above fast, has been paused by root since ")
    assert note.endswith(": new disks; nothing starts from it now")


def test_a_long_queue_is_paused_and_resumed_as_a_whole() -> None:
    lab = lab_of(gpus=0, cpus=1)
    lab.submit(queue="default")
    made: list[JobSpec] = list(lab.submission(queue="fast").specs) * 500
    ok(lab.ask(dataclasses.replace(lab.submission(), specs=made))[0])
    state = lab.scheduler.state
    waiting = [one for one in state.jobs if state.class_of(one) is not None]
    assert len(waiting) == 500
    pause(lab, "fast")
    assert not list(state.eligible.entries())
    assert all(state.why_infeasible(state.jobs[one]) is state.pauses.why("fast") for one in waiting)
    resume(lab, "fast")
    assert [job_id for _, entries in state.eligible.entries() for _, job_id in entries] == waiting
    check_memory(lab)
