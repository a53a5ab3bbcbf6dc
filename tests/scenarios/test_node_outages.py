"""Nodes that do not answer: their runs keep their state, users see why, and owners are told once it lasts."""

from __future__ import annotations

from lab import Lab

from gpusched.model.job import Alerting, Request
from gpusched.model.settings import AlertSettings
from gpusched.model.snapshot import Reason
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.units import format_duration

WHY = "node n2 has not answered since 14:02:11: ssh to n2 ended with 255"


def start(lab: Lab, *nodes: str, **parts: object) -> int:
    job = lab.submit(request=Request(gpus=1, nodes=len(nodes), nodelist=nodes), **parts)
    lab.turn()
    assert lab.job(job).state is JobState.RUNNING
    return job


def reason(lab: Lab, job: int) -> Reason | None:
    return lab.scheduler.reason_for(lab.job(job))


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
    lab.turn(60)
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
    lab.turn(299)
    assert notes(lab, asked) == []
    for _ in range(3):
        lab.turn(1)
        expected = f"{WHY}, for {format_duration(300)}; the job may be running there"
        assert notes(lab, asked) == [expected]
        assert notes(lab, silent) == [expected]
    alerts = {alert.event: alert for alert in lab.scheduler.alerts.rows.values()}
    assert set(alerts) == {"node_unreachable", "node_down"}
    assert alerts["node_unreachable"].job_id == asked
    assert dict(alerts["node_down"].facts)["message"] == f"{WHY}; running there: jobs {asked} and {silent}"


def test_a_short_outage_is_no_news_and_the_next_one_counts_anew() -> None:
    lab = lab_of()
    job = start(lab, "n2")
    cut(lab)
    lab.turn(299)
    lab.scheduler.outages.see("n2", None, lab.clock.now())
    lab.turn(300)
    cut(lab)
    lab.turn(299)
    assert notes(lab, job) == []
    lab.turn(2)
    assert len(notes(lab, job)) == 1


def test_an_outage_with_another_reason_is_the_same_outage() -> None:
    lab = lab_of()
    job = start(lab, "n2")
    cut(lab)
    lab.turn(301)
    lab.scheduler.outages.see("n2", "node n2 takes no jobs from this daemon: another version", lab.clock.now())
    lab.turn(301)
    assert len(notes(lab, job)) == 1
    found = reason(lab, job)
    assert found is not None
    assert found.text.startswith("node n2 takes no jobs from this daemon: another version")
