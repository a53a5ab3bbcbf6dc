"""Steps as the daemon records them: who gets what, how they end, and that each ends exactly once."""

from __future__ import annotations

import time
from typing import Any

import pytest
from lab import ANN, BOB, ROOT, Lab
from memory import check_memory

from gpusched.addons.simulate.engine import SimulatedEngine, SimulatedOutcome
from gpusched.addons.slurm import step_client
from gpusched.addons.slurm.command import CommandError, parse
from gpusched.addons.slurm.srun import COMMAND
from gpusched.addons.slurm.step_options import Options
from gpusched.daemon.failures import STEPS
from gpusched.daemon.reconcile import adopt_open_runs
from gpusched.daemon.watch.steps import StepWatch
from gpusched.errors import BrokenInvariant, Forbidden, GpuschedError, NotFound, Refused
from gpusched.model import step as model_step
from gpusched.model.commands import (
    BeginStep,
    Cancel,
    CancelStep,
    EndStep,
    EnterJob,
    LoseSteps,
    Requeue,
    Resume,
    Selection,
    Suspend,
)
from gpusched.model.execution import EngineEvent, SignalOrder, StepStopOrder
from gpusched.model.job import Request
from gpusched.model.states import JobState
from gpusched.model.step import StepRequest


def ok(answers: list[Any]) -> dict[str, Any]:
    (answer,) = answers
    if isinstance(answer, GpuschedError):
        raise answer
    assert isinstance(answer, dict)
    return answer


def started(lab: Lab, **request: Any) -> int:
    job_id = lab.submit(request=Request(**{"cpus": 4, "gpus": 2, **request}))
    lab.tick(0.1)
    assert lab.job(job_id).state is JobState.RUNNING
    return job_id


def begin(
    lab: Lab, job_id: int, pid: int, *, caller: Any = ANN, run: int = 1, node: str = "", **parts: Any
) -> dict[str, Any]:
    request = StepRequest(**parts)
    command = BeginStep(caller, f"{job_id}.{run}", pid, 7, "train", "python train.py", request, node=node)
    return ok(lab.ask(command))


def gpus_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """GPUs of a step on one node."""
    (node,) = answer["nodes"]
    gpus: list[dict[str, Any]] = node["gpus"]
    return gpus


def end(lab: Lab, job_id: int, number: int, code: int | None = 0, number_of_signal: int | None = None) -> str:
    answer = ok(lab.ask(EndStep(ANN, f"{job_id}.1", number, code, number_of_signal)))
    return str(answer["step"]["state"])


def rows(lab: Lab, job_id: int) -> list[tuple[int, str, int | None, int | None]]:
    return [(one.number, str(one.state), one.exit_code, one.signal) for one in lab.store.steps([job_id])]


@pytest.fixture
def lab() -> Lab:
    return Lab(gpus=2, cpus=8, outcome=SimulatedOutcome(runs_s=1000))


def test_steps_are_numbered_from_zero_and_share_the_jobs_gpus(lab: Lab) -> None:
    job_id = started(lab)
    first, second = begin(lab, job_id, 1)["step"], begin(lab, job_id, 2)["step"]
    assert (first["step"], second["step"]) == (0, 1)
    assert gpus_of(first) == gpus_of(second) == [{"index": 0, "visible": "0"}, {"index": 1, "visible": "1"}]
    assert (first["has_own_gpus"], first["node"]) == (False, "n1")
    check_memory(lab)


@pytest.mark.parametrize(
    ("code", "number", "state"),
    [(0, None, "COMPLETED"), (3, None, "FAILED"), (None, 9, "FAILED")],
)
def test_a_steps_end_tells_its_state(lab: Lab, code: int | None, number: int | None, state: str) -> None:
    job_id = started(lab)
    begin(lab, job_id, 1)
    assert end(lab, job_id, 0, code, number) == state
    assert rows(lab, job_id) == [(0, state, code, number)]
    check_memory(lab)


def test_a_second_end_changes_nothing(lab: Lab) -> None:
    job_id = started(lab)
    begin(lab, job_id, 1)
    assert (end(lab, job_id, 0, 0), end(lab, job_id, 0, 1)) == ("COMPLETED", "COMPLETED")
    assert rows(lab, job_id) == [(0, "COMPLETED", 0, None)]


def test_both_ends_in_one_tick_are_one(lab: Lab) -> None:
    job_id = started(lab)
    begin(lab, job_id, 1)
    lab.ask(EndStep(ANN, f"{job_id}.1", 0, 0), LoseSteps(((job_id, 1, 0),)), EndStep(ANN, f"{job_id}.1", 0, 5))
    assert rows(lab, job_id) == [(0, "COMPLETED", 0, None)]


def test_begun_and_ended_in_one_tick(lab: Lab) -> None:
    job_id = started(lab)
    lab.ask(
        BeginStep(ANN, f"{job_id}.1", 1, 7, name="a", command="a"),
        EndStep(ANN, f"{job_id}.1", 0, 0),
        EndStep(ANN, f"{job_id}.1", 0, 9),
        BeginStep(ANN, f"{job_id}.1", 2, 7, name="b", command="b"),
    )
    assert rows(lab, job_id) == [(0, "COMPLETED", 0, None), (1, "RUNNING", None, None)]
    check_memory(lab)


def test_a_process_that_asks_again_gets_the_step_it_has(lab: Lab) -> None:
    job_id = started(lab)
    first = begin(lab, job_id, 1)
    lab.restart()
    assert begin(lab, job_id, 1) == first
    assert len(rows(lab, job_id)) == 1
    assert begin(lab, job_id, 2)["step"]["step"] == 1


def test_numbers_go_on_after_a_restart(lab: Lab) -> None:
    job_id = started(lab)
    begin(lab, job_id, 1)
    end(lab, job_id, 0)
    lab.restart()
    assert begin(lab, job_id, 1)["step"]["step"] == 1


def test_a_step_that_could_not_be_recorded_does_not_exist(lab: Lab) -> None:
    job_id = started(lab)
    lab.store.is_full = True
    with pytest.raises(GpuschedError):
        begin(lab, job_id, 1)
    lab.store.is_full = False
    lab.tick()
    assert rows(lab, job_id) == []
    assert begin(lab, job_id, 1)["step"]["step"] == 0
    check_memory(lab)


def test_steps_with_gpus_of_their_own_wait_for_each_other(lab: Lab) -> None:
    job_id = started(lab)
    first, second = (begin(lab, job_id, pid, gpus=1)["step"] for pid in (1, 2))
    assert [[gpu["index"] for gpu in gpus_of(one)] for one in (first, second)] == [[0], [1]]
    assert begin(lab, job_id, 3, gpus=1) == {"step": None, "why": "busy"}
    # Others share what the job has, and who says so shares what others have for themselves.
    assert len(gpus_of(begin(lab, job_id, 4)["step"])) == 2
    assert len(gpus_of(begin(lab, job_id, 5, gpus=1, overlaps=True)["step"])) == 1
    end(lab, job_id, 0)
    assert gpus_of(begin(lab, job_id, 3, gpus=1)["step"]) == [{"index": 0, "visible": "0"}]
    check_memory(lab)


def test_a_step_without_gpus_takes_none_from_others(lab: Lab) -> None:
    job_id = started(lab)
    assert gpus_of(begin(lab, job_id, 1, gpus=0)["step"]) == []
    assert len(gpus_of(begin(lab, job_id, 2, gpus=2)["step"])) == 2


def test_exact_steps_share_no_cpus(lab: Lab) -> None:
    job_id = started(lab)
    assert begin(lab, job_id, 1, is_exact=True, tasks=3)["step"]
    assert begin(lab, job_id, 2, is_exact=True, tasks=1, cpus_per_task=2)["step"] is None
    assert begin(lab, job_id, 3, is_exact=True)["step"]
    assert begin(lab, job_id, 4, is_exact=True)["step"] is None
    assert begin(lab, job_id, 5, tasks=4)["step"]
    assert begin(lab, job_id, 6, is_exact=True, overlaps=True, tasks=4)["step"]
    end(lab, job_id, 0)
    assert begin(lab, job_id, 2, is_exact=True, tasks=1, cpus_per_task=2)["step"]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"tasks": 5}, "requests 5 CPUs, but job 1 has 4"),
        ({"tasks": 2, "cpus_per_task": 3}, "requests 6 CPUs"),
        ({"gpus": 3}, "requests 3 GPUs, but job 1 has 2"),
    ],
)
def test_what_the_job_can_never_give_is_refused(lab: Lab, parts: dict[str, Any], words: str) -> None:
    job_id = started(lab)
    with pytest.raises(Refused, match=words):
        begin(lab, job_id, 1, **parts)
    assert rows(lab, job_id) == []


def test_overcommit_takes_more_tasks_than_cpus(lab: Lab) -> None:
    job_id = started(lab)
    assert begin(lab, job_id, 1, tasks=40, overcommits=True)["step"]


def test_the_number_of_steps_is_bounded(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpusched.addons.slurm.step_verbs.MOST_STEPS", 2)
    job_id = started(lab)
    for pid in (1, 2):
        begin(lab, job_id, pid)
        end(lab, job_id, pid - 1)
    with pytest.raises(Refused, match="maximum of 2 steps"):
        begin(lab, job_id, 3)
    assert model_step.MOST_STEPS == 40_000


def test_another_user_begins_and_ends_no_step(lab: Lab) -> None:
    job_id = started(lab)
    with pytest.raises(Forbidden):
        begin(lab, job_id, 1, caller=BOB)
    begin(lab, job_id, 1)
    with pytest.raises(Forbidden):
        ok(lab.ask(EndStep(BOB, f"{job_id}.1", 0, 0)))
    with pytest.raises(Forbidden):
        ok(lab.ask(CancelStep(BOB, job_id, 0)))
    assert rows(lab, job_id) == [(0, "RUNNING", None, None)]


def test_no_step_of_another_run_or_job_is_ended(lab: Lab) -> None:
    job_id, other = started(lab, gpus=0), started(lab, gpus=0)
    begin(lab, job_id, 1)
    with pytest.raises(NotFound):
        end(lab, other, 0)
    with pytest.raises(NotFound):
        ok(lab.ask(EndStep(ANN, f"{job_id}.2", 0, 0)))
    assert rows(lab, job_id) == [(0, "RUNNING", None, None)]


def test_a_cancelled_step_is_ended_and_remembers_by_whom(lab: Lab) -> None:
    job_id = started(lab)
    begin(lab, job_id, 1)
    assert ok(lab.ask(CancelStep(ROOT, job_id, 0)))["cancelled"] == [f"{job_id}.0"]
    assert lab.engine.step_stops == [(f"{job_id}.1", StepStopOrder(0))]
    assert end(lab, job_id, 0, None, 15) == "CANCELLED"
    (row,) = lab.store.steps([job_id])
    assert (row.cancel_uid, row.signal) == (0, 15)
    assert lab.job(job_id).state is JobState.RUNNING
    assert ok(lab.ask(CancelStep(ANN, job_id, 0)))["ended"] == [f"{job_id}.0"]
    with pytest.raises(NotFound):
        ok(lab.ask(CancelStep(ANN, job_id, 5)))


def test_a_signal_goes_to_one_step(lab: Lab) -> None:
    job_id = started(lab)
    begin(lab, job_id, 1)
    assert ok(lab.ask(CancelStep(ANN, job_id, 0, 12)))["signalled"] == [f"{job_id}.0"]
    assert lab.engine.signals == [(f"{job_id}.1", SignalOrder(12, "step:0"))]
    lab.ask(CancelStep(ANN, job_id, 0, 9))
    assert lab.engine.step_stops == [(f"{job_id}.1", StepStopOrder(0, 0.0))]


@pytest.mark.parametrize("to", ["tree", "main", "steps", "full"])
def test_a_signal_to_a_job_names_its_receivers(lab: Lab, to: str) -> None:
    job_id = started(lab)
    lab.ask(Cancel(ANN, Selection((job_id,)), 12, to))
    assert lab.engine.signals == [(f"{job_id}.1", SignalOrder(12, to))]


def test_a_lost_process_ends_its_step_and_what_it_started(lab: Lab) -> None:
    job_id = started(lab)
    begin(lab, job_id, 1, gpus=2)
    lab.ask(LoseSteps(((job_id, 1, 0), (job_id, 1, 4), (99, 1, 0))))
    assert rows(lab, job_id) == [(0, "CANCELLED", None, 9)]
    assert lab.engine.step_stops == [(f"{job_id}.1", StepStopOrder(0, 0.0))]
    assert begin(lab, job_id, 2, gpus=2)["step"]


def test_a_process_that_ended_unseen_is_not_said_to_have_been_killed(lab: Lab) -> None:
    job_id = started(lab)
    begin(lab, job_id, 1)
    lab.ask(LoseSteps(((job_id, 1, 0),), is_seen=False))
    assert rows(lab, job_id) == [(0, "CANCELLED", None, None)]


@pytest.mark.parametrize("restarts", [False, True])
def test_the_end_of_a_run_closes_its_steps(restarts: bool) -> None:
    lab = Lab(outcome=SimulatedOutcome(runs_s=10))
    job_id = started(lab)
    begin(lab, job_id, 1)
    begin(lab, job_id, 2)
    end(lab, job_id, 0)
    if restarts:
        lab.restart()
    lab.tick(20)
    lab.tick(1)
    assert lab.job(job_id).state is JobState.COMPLETED
    assert rows(lab, job_id) == [(0, "COMPLETED", 0, None), (1, "CANCELLED", None, None)]
    check_memory(lab)


def test_a_step_that_ends_while_its_job_is_cancelled_is_cancelled(lab: Lab) -> None:
    job_id = started(lab)
    begin(lab, job_id, 1)
    begin(lab, job_id, 2)
    lab.ask(Cancel(ANN, Selection((job_id,))), EndStep(ANN, f"{job_id}.1", 0, None, 15))
    assert rows(lab, job_id)[0] == (0, "CANCELLED", None, 15)
    with pytest.raises((Refused, NotFound)):
        begin(lab, job_id, 3)


def test_a_step_of_a_suspended_job_waits_for_its_resume(lab: Lab) -> None:
    job_id = started(lab)
    lab.ask(Suspend(ANN, (job_id,)))
    assert begin(lab, job_id, 1) == {"step": None, "why": "suspended"}
    lab.ask(Resume(ANN, (job_id,)))
    assert begin(lab, job_id, 1)["step"]["step"] == 0


def test_a_step_waits_for_the_signal_that_ends_its_job_and_is_refused_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(gpus=2, cpus=8, outcome=SimulatedOutcome(runs_s=1000, stop_takes_s=5))
    job_id = started(lab)
    with monkeypatch.context() as patch:
        patch.setattr(SimulatedEngine, "events", lambda engine: [])
        lab.ask(Cancel(ANN, Selection((job_id,))))
        assert begin(lab, job_id, 1) == {"step": None, "why": "ending"}
    lab.tick(0.1)
    with pytest.raises(Refused) as refused:
        begin(lab, job_id, 2)
    assert refused.value.about == "not_running"
    lab.tick(10)
    assert lab.scheduler.state.steps.closed == set()


def test_a_step_on_several_nodes_waits_for_the_signal_of_its_own() -> None:
    lab = Lab(gpus=2, cpus=4, outcome=SimulatedOutcome(runs_s=1000, stop_takes_s=5), more_nodes=("n2",))
    job_id = on_two(lab)
    lab.ask(Cancel(ANN, Selection((job_id,))))
    lab.tick(0.1)
    assert lab.scheduler.state.steps.closed == {f"{job_id}.1"}
    assert begin(lab, job_id, 1, node="n1") == {"step": None, "why": "ending"}


@pytest.mark.parametrize(("immediate", "before"), [([], []), (["--immediate"], []), ([], ["busy", "busy"])])
def test_srun_waits_only_so_long_for_a_signal_however_long_it_had_waited_before(
    immediate: list[str], before: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A daemon that was restarted does not know that it came.
    asked_at: list[float] = []
    whys = iter(before)

    class Scheduler:
        def ask(self, *request: object) -> dict[str, Any]:
            if (why := next(whys, None)) is not None:
                return {"step": None, "why": why}
            asked_at.append(time.monotonic())
            return {"step": None, "why": "ending"}

    monkeypatch.setattr(step_client, "SIGNAL_WAIT_S", 0.3)
    typed = parse(COMMAND, ["--quiet", *immediate, "true"])
    job = {"id": 3, "job_id": 3, "node": "n1", "nodes": ["n1"], "cpus": 1}
    with pytest.raises(CommandError, match="Unable to create step for job 3: Job is being ended"):
        step_client.begin_step(COMMAND, typed, Options(COMMAND, typed, job), job, Scheduler())  # type: ignore[arg-type]
    assert time.monotonic() - asked_at[0] >= 0.3


def test_a_requeued_run_numbers_its_steps_anew(lab: Lab) -> None:
    job_id = started(lab)
    begin(lab, job_id, 1)
    lab.ask(Requeue(ANN, (job_id,)))
    for _ in range(60):
        lab.tick(1)
        if lab.job(job_id).run == 2 and lab.job(job_id).state is JobState.RUNNING:
            break
    assert begin(lab, job_id, 1, run=2)["step"]["step"] == 0
    assert [(one.run, one.number, str(one.state)) for one in lab.store.steps([job_id])] == [
        (1, 0, "CANCELLED"),
        (2, 0, "RUNNING"),
    ]


@pytest.fixture
def pair() -> Lab:
    """Two nodes."""
    return Lab(gpus=2, cpus=4, outcome=SimulatedOutcome(runs_s=1000), more_nodes=("n2",))


def on_two(lab: Lab) -> int:
    job_id = lab.submit(request=Request(nodes=2, cpus=4, gpus=2))
    lab.tick(0.1)
    return job_id


def test_a_step_over_two_nodes_waits_until_both_have_started(pair: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    second, events = pair.engines["n2"], SimulatedEngine.events

    def heard(engine: SimulatedEngine) -> list[EngineEvent]:
        return [] if engine is second else events(engine)

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedEngine, "events", heard)
        job_id = on_two(pair)
        assert pair.job(job_id).state is JobState.RUNNING
        assert begin(pair, job_id, 1, node="n1") == {"step": None, "why": "starting"}
    pair.tick(0.1)
    assert [node["node"] for node in begin(pair, job_id, 1, node="n1")["step"]["nodes"]] == ["n1", "n2"]
    check_memory(pair)


def test_processes_with_the_same_number_on_two_nodes_have_a_step_each(pair: Lab) -> None:
    job_id = on_two(pair)
    first, second = (begin(pair, job_id, 1, node=node, gpus_per_node=1)["step"] for node in ("n1", "n2"))
    assert [(one["step"], one["node"]) for one in (first, second)] == [(0, "n1"), (1, "n2")]
    assert [[[gpu["index"] for gpu in node["gpus"]] for node in one["nodes"]] for one in (first, second)] == [
        [[0], [0]],
        [[1], [1]],
    ]
    pair.restart()
    assert begin(pair, job_id, 1, node="n2", gpus_per_node=1)["step"] == second
    check_memory(pair)


def test_a_step_on_the_node_of_its_process_alone_has_no_parts(pair: Lab) -> None:
    job_id = on_two(pair)
    begin(pair, job_id, 1, node="n1", nodes_min=1)
    begin(pair, job_id, 1, node="n2", nodelist=("n2",))
    begin(pair, job_id, 2, node="n2", nodelist=("n1",))
    begin(pair, job_id, 3, node="n2")
    steps = pair.store.steps([job_id])
    assert [(step.node, step.nodes, len(step.parts)) for step in steps] == [
        ("n1", ("n1",), 0),
        ("n2", ("n2",), 0),
        ("n2", ("n1",), 1),
        ("n2", ("n1", "n2"), 2),
    ]


def test_what_refusals_of_steps_are_about(pair: Lab) -> None:
    job_id = on_two(pair)
    for parts, about in (({"tasks": 9}, "cpus"), ({"gpus": 5}, "gpus"), ({"nodelist": ("n7",)}, "nodes")):
        with pytest.raises(Refused) as refused:
            begin(pair, job_id, 1, node="n1", **parts)
        assert refused.value.about == about
    pair.ask(Cancel(ANN, Selection((job_id,))))
    with pytest.raises((Refused, NotFound)) as ended:
        begin(pair, job_id, 1, node="n1")
    assert (type(ended.value), ended.value.about) in ((Refused, "not_running"), (NotFound, ""))


def test_an_exclusive_job_has_the_cpus_of_its_nodes() -> None:
    lab = Lab(cpus=4, outcome=SimulatedOutcome(runs_s=1000), more_nodes=("n2",))
    job_id = lab.submit(request=Request(nodes=2, cpus=1, is_exclusive=True))
    lab.tick(0.1)
    nodes = begin(lab, job_id, 1, tasks=8)["step"]["nodes"]
    assert [(node["cpus"], len(node["tasks"])) for node in nodes] == [(4.0, 4), (4.0, 4)]


def test_what_a_lost_node_runs_is_killed_and_the_step_says_so(pair: Lab) -> None:
    job_id = on_two(pair)
    begin(pair, job_id, 1, node="n1")
    handle = f"{job_id}.1"
    assert ok(pair.ask(EndStep(ANN, handle, 0, 143, is_node_lost=True)))["step"]["state"] == "NODE_FAIL"
    assert pair.engines["n2"].step_stops == [(handle, StepStopOrder(0, 0.0))]
    begin(pair, job_id, 1, node="n1")
    assert ok(pair.ask(EndStep(ANN, handle, 1, 143)))["step"]["state"] == "FAILED"
    assert len(pair.engines["n2"].step_stops) == 1, "all of its tasks have reported their end"
    check_memory(pair)


def test_a_cancelled_step_stays_cancelled_whatever_it_has_lost(pair: Lab) -> None:
    job_id = on_two(pair)
    begin(pair, job_id, 1, node="n1")
    ok(pair.ask(CancelStep(ANN, job_id, 0)))
    ended = EndStep(ANN, f"{job_id}.1", 0, None, 9, is_timeout=True, is_node_lost=True)
    assert ok(pair.ask(ended))["step"]["state"] == "CANCELLED"


def test_a_restarted_daemon_repeats_the_orders_that_a_node_may_not_have_heard(pair: Lab) -> None:
    job_id = on_two(pair)
    handle = f"{job_id}.1"
    for pid, node in ((1, "n1"), (2, "n1"), (3, "n2"), (4, "n1")):
        begin(pair, job_id, pid, node=node, **({"nodelist": ("n2",), "nodes_max": 1} if pid == 3 else {}))
    ok(pair.ask(EndStep(ANN, handle, 0, 143, is_node_lost=True)))
    ok(pair.ask(LoseSteps(((job_id, 1, 1),))))
    ok(pair.ask(LoseSteps(((job_id, 1, 2),))))
    ok(pair.ask(EndStep(ANN, handle, 3, 1)))
    pair.engines["n2"].step_stops.clear()
    scheduler = pair.restart()
    adopt_open_runs(scheduler.state, scheduler.engine)
    watch = StepWatch(pair.ticker)
    watch.poll()
    # Step 2 was on the node of its process alone, which has seen it end; step 3 has ended by itself.
    assert pair.engines["n2"].step_stops == [(handle, StepStopOrder(0, 0.0)), (handle, StepStopOrder(1, 0.0))]
    watch.poll()
    assert len(pair.engines["n2"].step_stops) == 2


# --- exceptions at any step of a tick ------------------------------------------------------------------


@pytest.mark.parametrize("at", STEPS)
def test_an_exception_at_any_step_of_a_tick_begins_and_ends_every_step_once(pair: Lab, at: str) -> None:
    """Who begins a step asks again, as srun does, and gets the one that was recorded, with doors."""
    job_id = on_two(pair)
    handle = f"{job_id}.1"
    for pid in (1, 2, 3):
        begin(pair, job_id, pid, node="n1")
    begins = BeginStep(ANN, handle, 4, 7, "train", "train.py", StepRequest(), node="n1", token="ab" * 8)
    ends = EndStep(ANN, handle, 0, None, 9, is_node_lost=True)
    cancels = CancelStep(ANN, job_id, 1)
    loses = LoseSteps(((job_id, 1, 2),))
    enters = EnterJob(ANN, job_id, "cd" * 8)

    def raising(name: str) -> None:
        if name == at:
            raise RuntimeError("a bug")

    pair.ticker._step = raising
    answers: list[Any] = []
    for command in (begins, ends, cancels, loses, enters):
        pair.ticker.submit(command, answers.append)
    is_recorded = STEPS.index(at) > STEPS.index("commit")
    if is_recorded:
        pair.ticker.tick()
        assert answers[0]["step"]["step"] == 3
        assert not any(isinstance(answer, Exception) for answer in answers)
    else:
        with pytest.raises(RuntimeError):
            pair.ticker.tick()
        assert [type(answer) for answer in answers] == [BrokenInvariant] * 5
        assert [row[1] for row in rows(pair, job_id)] == ["RUNNING"] * 3
    pair.ticker._step = lambda name: None
    pair.tick(0.1)
    check_memory(pair)
    again = [ok(pair.ask(command)) for command in (begins, ends, cancels, loses, enters)]
    assert again[0]["step"]["step"] == 3
    assert [row[:2] for row in rows(pair, job_id)] == [
        (0, "NODE_FAIL"),
        (1, "RUNNING"),
        (2, "CANCELLED"),
        (3, "RUNNING"),
    ]
    # A door is asked for again with the step; what ends one is ordered once.
    entered = {node: [one.token for _, one in pair.engines[node].entered] for node in ("n1", "n2")}
    assert "ab" * 8 in entered["n2"]
    assert "ab" * 8 not in entered["n1"]
    assert "cd" * 8 in entered["n2"]
    stops = pair.engines["n2"].step_stops
    assert (handle, StepStopOrder(1)) in stops
    killed = [(handle, StepStopOrder(0, 0.0)), (handle, StepStopOrder(2, 0.0))]
    assert [stop for stop in stops if stop[1].grace_s == 0.0] == killed


class TestGpuTypes:
    """Of a job on an A100 of n1 and a V100 of n2."""

    @pytest.fixture
    def mixed(self) -> Lab:
        models = {"n1": "NVIDIA A100-SXM4-40GB", "n2": "Tesla V100"}
        return Lab(gpus=2, cpus=8, outcome=SimulatedOutcome(runs_s=1000), more_nodes=("n2",), models=models)

    @pytest.mark.parametrize("asked", [{"gpus": 1}, {"gpus_per_node": 1, "nodes_min": 1}, {"gpus_per_task": 1}])
    def test_a_step_gets_gpus_of_its_type_only(self, mixed: Lab, asked: dict[str, int]) -> None:
        job_id = started(mixed, nodes=2)
        step = begin(mixed, job_id, 1, tasks=1, gpu_type="v100", **asked)["step"]
        assert [(one["node"], len(one["gpus"])) for one in step["nodes"]] == [("n2", 1)]
        step = begin(mixed, job_id, 2, tasks=1, gpu_type="a100 sxm4", **asked)["step"]
        assert [one["node"] for one in step["nodes"]] == ["n1"]

    def test_a_type_that_the_job_does_not_have_is_refused(self, mixed: Lab) -> None:
        job_id = started(mixed, nodelist=("n1",))
        with pytest.raises(Refused) as refused:
            begin(mixed, job_id, 1, gpus=1, gpu_type="v100")
        assert refused.value.about == "gpus"
        assert refused.value.message == (
            f"the step requests a GPU of type 'v100', but the GPUs of job {job_id} are: NVIDIA A100-SXM4-40GB"
        )
        with pytest.raises(Refused, match="the step requests 3 a100 GPUs, but job 1 has 2"):
            begin(mixed, job_id, 1, gpus=3, gpu_type="a100")
        assert rows(mixed, job_id) == []
