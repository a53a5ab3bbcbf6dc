"""Nodes that do not answer: their runs keep their state, users see why, and owners are told once it lasts."""

from __future__ import annotations

import pytest
from lab import ANN, ROOT, Lab

from gpusched.errors import Forbidden, GpuschedError, NotFound, Refused
from gpusched.model.commands import Caller, DeclareDown, Drain
from gpusched.model.job import Alerting, Request, RetryRule
from gpusched.model.settings import AlertSettings
from gpusched.model.snapshot import Reason
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.units import format_duration
from gpusched.ports.tables import DRAINS

WHY = "node n2 has not answered since 14:02:11: ssh to n2 ended with 255"


def start(lab: Lab, *nodes: str, **parts: object) -> int:
    job = lab.submit(request=Request(gpus=1, nodes=len(nodes), nodelist=nodes), **parts)
    lab.tick()
    assert lab.job(job).state is JobState.RUNNING
    return job


def reason(lab: Lab, job: int) -> Reason | None:
    return lab.scheduler.answers.reason_for(lab.job(job))


def notes(lab: Lab, job: int) -> list[str]:
    return [event.text for event in lab.store.events(job) if event.kind == "note" and "answered" in event.text]


def lab_of(**alert: object) -> Lab:
    lab = Lab(more_nodes=("n2", "n3"), alert=AlertSettings(unreachable_s=300, **alert))
    lab.outcome = lab.outcome.__class__(runs_s=10_000)
    lab.scheduler.outages.be_members({"n1", "n2", "n3"})
    return lab


def cut(lab: Lab, node: str = "n2") -> None:
    lab.scheduler.outages.see(node, WHY, lab.clock.now())


def test_a_running_job_has_a_reason_while_a_node_of_it_does_not_answer() -> None:
    lab = lab_of()
    alone, gang, other = start(lab, "n2"), start(lab, "n2", "n3"), start(lab, "n3")
    assert [reason(lab, job) for job in (alone, gang, other)] == [None, None, None]
    cut(lab)
    lab.tick(60)
    for job in (alone, gang):
        found = reason(lab, job)
        assert found is not None
        assert found.code is ReasonCode.NODE_UNREACHABLE
        assert found.text == f"{WHY}; the job may be running there, so its GPUs stay booked"
        assert found.facts == {"unreachable": ["n2"], "unreachable_at": lab.clock.now() - 60}
        assert lab.job(job).state is JobState.RUNNING
    assert reason(lab, other) is None
    lab.scheduler.outages.see("n2", None, lab.clock.now())
    assert reason(lab, alone) is None


def test_a_run_on_a_node_that_was_taken_out_of_the_settings_says_so() -> None:
    lab = lab_of()
    job = start(lab, "n3")
    lab.scheduler.outages.be_members({"n1", "n2"})
    found = reason(lab, job)
    assert found is not None
    assert found.text.startswith("node n3 is no longer part of the cluster; name it again in [cluster] nodes")


def test_the_owner_is_told_once_an_outage_lasts() -> None:
    lab = lab_of(admin=("ops",))
    asked = start(lab, "n2", alerting=Alerting(("node_unreachable",), ("me",)))
    silent = start(lab, "n2")
    cut(lab)
    lab.tick(299)
    assert notes(lab, asked) == []
    for _ in range(3):
        lab.tick(1)
        expected = f"{WHY}, for {format_duration(300)}; the job may be running there"
        assert notes(lab, asked) == [expected]
        assert notes(lab, silent) == [expected]
    alerts = {alert.event: alert for alert in lab.scheduler.alerts.rows.values()}
    assert set(alerts) == {"node_unreachable", "node_down"}
    assert alerts["node_unreachable"].job_id == asked
    assert dict(alerts["node_down"].facts)["message"] == f"{WHY}; running there: jobs {asked} and {silent}"


def test_a_node_that_can_start_nothing_gets_no_jobs_and_administrators_are_told() -> None:
    lab = lab_of(admin=("ops",))
    running = start(lab, "n2")
    node = lab.scheduler.cluster["n2"]

    def told() -> list[str]:
        rows = lab.scheduler.alerts.rows.values()
        return [dict(alert.facts)["message"] for alert in rows if alert.event == "node_full"]

    full = "only 12 KiB are free in the spool /s"
    node.be_in_trouble(full)
    lab.scheduler.look_again()
    waiting = lab.submit(request=Request(gpus=1, nodelist=("n2",)))
    elsewhere = lab.submit(request=Request(gpus=1))
    for _ in range(3):
        lab.tick()
    assert told() == [f"node n2 starts nothing: {full}"]
    assert [lab.job(job).state for job in (running, waiting, elsewhere)] == [
        JobState.RUNNING,
        JobState.PENDING,
        JobState.RUNNING,
    ]
    found = reason(lab, waiting)
    assert found is not None
    assert full in found.text
    assert reason(lab, running) is None
    node.be_in_trouble(None)
    lab.scheduler.look_again()
    lab.tick()
    assert lab.job(waiting).state is JobState.RUNNING
    node.be_in_trouble("the spool /s is read-only")
    lab.tick(3600)
    assert told()[-1] == "node n2 starts nothing: the spool /s is read-only"


def test_a_short_outage_is_no_news_and_the_next_one_counts_anew() -> None:
    lab = lab_of()
    job = start(lab, "n2")
    cut(lab)
    lab.tick(299)
    lab.scheduler.outages.see("n2", None, lab.clock.now())
    lab.tick(300)
    cut(lab)
    lab.tick(299)
    assert notes(lab, job) == []
    lab.tick(2)
    assert len(notes(lab, job)) == 1


def test_an_outage_with_another_reason_is_the_same_outage() -> None:
    lab = lab_of()
    job = start(lab, "n2")
    cut(lab)
    lab.tick(301)
    lab.scheduler.outages.see("n2", "node n2 takes no jobs from this daemon: another version", lab.clock.now())
    lab.tick(301)
    assert len(notes(lab, job)) == 1
    found = reason(lab, job)
    assert found is not None
    assert found.text.startswith("node n2 takes no jobs from this daemon: another version")


# --- declared down -------------------------------------------------------------------------------------------


def down(lab: Lab, *nodes: str, caller: Caller = ROOT, is_confirmed: bool = True) -> object:
    (answer,) = lab.ask(DeclareDown(caller, nodes, "fan", is_confirmed))
    return answer


def unreachable(lab: Lab, node: str = "n2") -> None:
    cut(lab, node)
    lab.scheduler.cluster[node].why_not = WHY
    lab.scheduler.look_again()


@pytest.mark.parametrize(
    ("nodes", "caller", "error", "text"),
    [
        (("n2",), ANN, Forbidden, "declare nodes down"),
        (("n9",), ROOT, NotFound, "'n9' is not a node here"),
        (("n1",), ROOT, Refused, "n1 is the daemon's own node, which is up"),
        (("n2", "n3"), ROOT, Refused, "node n3 answers, so it reports itself what becomes of its runs"),
    ],
)
def test_only_nodes_that_do_not_answer_are_declared_down(
    nodes: tuple[str, ...], caller: Caller, error: type[GpuschedError], text: str
) -> None:
    lab = lab_of()
    job = start(lab, "n2")
    unreachable(lab)
    answer = down(lab, *nodes, caller=caller)
    assert isinstance(answer, error)
    assert text in answer.message
    lab.tick()
    assert lab.job(job).state is JobState.RUNNING
    assert not lab.scheduler.state.rows[DRAINS]


def test_what_would_be_lost_is_said_first() -> None:
    lab = lab_of()
    jobs = [start(lab, "n2"), start(lab, "n2", "n3")]
    unreachable(lab)
    answer = down(lab, "n2", is_confirmed=False)
    assert isinstance(answer, Refused)
    assert answer.message.startswith(f"2 runs on node n2 would be lost (jobs {jobs[0]} and {jobs[1]}); jobs that may")
    assert answer.hint == "once it is certain that nothing runs there: gctl down n2 --confirm"
    lab.tick()
    assert [lab.job(job).state for job in jobs] == [JobState.RUNNING, JobState.RUNNING]


def test_a_declaration_ends_the_runs_there_and_no_others() -> None:
    lab = lab_of()
    lost, kept = start(lab, "n2"), start(lab, "n3")
    stays = start(lab, "n2", retry=RetryRule(requeue=False))
    unreachable(lab)
    assert down(lab, "n2") == {"changed": ["n2"], "lost": [str(lost), str(stays)]}
    lab.tick()
    lab.tick(60)
    assert [lab.job(job).state for job in (lost, kept, stays)] == [
        JobState.PENDING,
        JobState.RUNNING,
        JobState.NODE_FAIL,
    ]
    ended = lab.job(stays)
    assert (ended.reason, ended.reason_text) == (ReasonCode.NODE_DOWN, "root declared node n2 down: fan")
    assert not [held for held in lab.scheduler.state.holds.values() if held.node == "n2"], "nothing is booked there"


def test_a_drain_whose_message_says_so_declares_nothing_down() -> None:
    lab = lab_of()
    job = start(lab, "n2", retry=RetryRule(requeue=False))
    unreachable(lab)
    lab.ask(Drain(ROOT, ("n2",), "declared down: fan"))
    lab.tick()
    lab.tick(60)
    assert lab.job(job).state is JobState.RUNNING


def test_a_run_that_starts_after_the_declaration_is_not_lost_by_it() -> None:
    lab = lab_of()
    lost = start(lab, "n2")
    unreachable(lab)
    down(lab, "n2")
    lab.tick(60)
    lab.scheduler.outages.see("n2", None, lab.clock.now())
    lab.scheduler.cluster["n2"].why_not = None
    (answer,) = lab.ask(Drain(ROOT, ("n2",), None))
    assert answer["changed"] == ["n2"]
    lab.tick(60)
    lab.tick(60)
    found = lab.job(lost)
    assert (found.state, found.run) == (JobState.RUNNING, 2)
