"""The outbox of a scheduler turned by hand: what is recorded, when, and what a restart makes of it."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
from lab import ANN, BOB, ROOT, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.dispatch import Dispatcher
from gpusched.model.alert_events import EVENTS
from gpusched.model.alerts import Alert
from gpusched.model.commands import Caller, Cancel, Drain, Hold, Release, Reload, Selection, Submit, Update
from gpusched.model.job import Alerting, ArraySpec, Request
from gpusched.model.settings import AlertSettings
from gpusched.model.states import JobState
from gpusched.model.value import replace
from gpusched.ports.tables import ALERTS

ALL = Alerting(tuple(sorted(EVENTS)))


def asked(*words: str) -> Alerting:
    return Alerting(tuple(sorted(words)))


def keys(lab: Lab, state: str = "waiting") -> list[str]:
    """The outbox as it is in the table; the memory has to agree."""
    rows = list(lab.store.load(ALERTS).values())
    assert {row.key: row for row in rows} == lab.scheduler.alerts.rows
    return [row.key for row in rows if row.state == state]


def facts(lab: Lab, key: str) -> dict[str, Any]:
    return dict(lab.scheduler.alerts.rows[key].facts)


def finish(lab: Lab, seconds: float = 11) -> None:
    lab.tick(seconds)
    lab.tick()


def test_an_alert_is_committed_with_its_cause() -> None:
    lab = Lab()
    job = lab.submit(alerting=asked("begin", "end"))
    assert keys(lab) == [f"{job}.1 begin"]
    finish(lab)
    assert keys(lab) == [f"{job}.1 begin", f"{job}.1 end"]
    assert facts(lab, f"{job}.1 end")["node"] == "n1"


def test_uncommitted_events_are_not_sent() -> None:
    lab = Lab()
    lab.store.is_full = True
    lab.ask(lab.submission(alerting=ALL))
    assert keys(lab) == []
    assert lab.scheduler.alerts.waiting() == {}


def test_a_restart_finds_the_outbox_unchanged() -> None:
    lab = Lab()
    job = lab.submit(alerting=asked("end"))
    finish(lab)
    lab.restart()
    assert keys(lab) == [f"{job}.1 end"]
    assert list(lab.scheduler.alerts.waiting()) == [ANN.uid]


def test_the_limit_warning_is_sent_once_across_restarts_and_changes() -> None:
    lab = Lab(outcome=SimulatedOutcome(runs_s=1000))
    job = lab.submit(alerting=asked("time_limit_80"), time_limit_s=100)
    assert lab.ticker.next_due() == lab.clock.now() + 80
    lab.tick(79)
    assert keys(lab) == []
    lab.tick(1)
    assert keys(lab) == [f"{job}.1 time_limit_80"]
    tell_all(lab)
    assert keys(lab, "told") == [f"{job}.1 time_limit_80"]
    lab.restart()
    lab.tick(1)
    lab.tick(1)
    assert keys(lab) == []
    lab.ask(Cancel(ANN, Selection(ids=(job,))))
    finish(lab)
    assert lab.store.load(ALERTS) == {}


def tell_all(lab: Lab) -> None:
    """Have a courier say that everything was told."""
    dispatcher = Dispatcher(lab.scheduler, lambda uid, settings: Obliging())  # type: ignore[arg-type,return-value]
    dispatcher.reconcile()
    dispatcher.reconcile()


class Obliging:
    """A courier whose messages always arrive."""

    trouble = None

    @staticmethod
    def due_s() -> float | None:
        return None

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []
        self.handed: list[str] = []

    def submit(self, alerts: dict[str, Alert]) -> list[dict[str, Any]]:
        for key in alerts:
            self.handed.append(key)
            self.reports.append({"key": key, "target": "phone", "outcome": "told", "tries": 1})
            self.reports.append({"key": key, "done": True})
        return []

    def poll(self) -> list[dict[str, Any]]:
        taken, self.reports = self.reports, []
        return taken


def test_events_requested_later_are_sent_from_then_on() -> None:
    lab = Lab(outcome=SimulatedOutcome(runs_s=100))
    job = lab.submit(time_limit_s=110)
    lab.tick(90)
    lab.ask(Update(ANN, (job,), {"notify": ("begin", "end", "time_limit_80"), "notify_to": ("phone",)}))
    lab.tick()
    # The time limit was nearly used up when somebody asked.
    assert keys(lab) == [f"{job}.1 time_limit_80"]
    assert lab.scheduler.alerts.rows[f"{job}.1 time_limit_80"].targets == ("phone",)
    finish(lab, 20)
    assert keys(lab) == [f"{job}.1 time_limit_80", f"{job}.1 end"]


def test_unrequested_events_are_not_sent() -> None:
    lab = Lab(outcome=SimulatedOutcome(runs_s=100))
    job = lab.submit(time_limit_s=110, alerting=asked("end", "time_limit_80"))
    lab.ask(Update(ANN, (job,), {"notify": ()}))
    finish(lab, 101)
    assert keys(lab) == []
    assert lab.job(job).spec.alerting is None


def test_arrays_and_tasks_are_reported_under_their_names() -> None:
    lab = Lab(outcome=SimulatedOutcome(runs_s=10))
    array = lab.submit(array=ArraySpec("0-3"))
    lab.ask(Update(ANN, (array,), {"notify": ("end",)}))
    lab.ask(Update(ANN, (array + 2,), {"notify": ("end",)}))
    finish(lab)
    assert lab.job(array).state is JobState.COMPLETED
    assert keys(lab) == [f"{array}.0 end", f"{array + 2}.1 end"]


def test_a_long_wait_is_sent_once_with_the_reason() -> None:
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=5000), alert=AlertSettings(pending_s=600))
    lab.submit(request=Request(gpus=1))
    job = lab.submit(request=Request(gpus=1), alerting=asked("pending"))
    lab.tick(599)
    assert keys(lab) == []
    lab.tick(1)
    assert keys(lab) == [f"{job}.1 pending"]
    assert facts(lab, f"{job}.1 pending")["message"].startswith("pending for 10:00: ")
    tell_all(lab)
    lab.tick(5000)
    lab.tick(600)
    assert keys(lab) == []


def test_held_jobs_and_dependencies_do_not_count_as_long_waits() -> None:
    lab = Lab(outcome=SimulatedOutcome(runs_s=5000), alert=AlertSettings(pending_s=600))
    first = lab.submit()
    held = lab.submit(alerting=asked("pending"))
    lab.ask(Hold(ANN, (held,)))
    behind = lab.submit(alerting=asked("pending"), dependency=f"afterok:{first}")
    lab.tick(601)
    lab.tick(601)
    assert keys(lab) == []
    assert lab.job(behind).state is JobState.PENDING


def test_an_empty_queue_is_sent_when_the_users_last_job_ended() -> None:
    lab = Lab(outcome=SimulatedOutcome(runs_s=10))
    lab.ask(lab.submission(BOB, hold=True))
    asked_for = lab.submit(alerting=asked("queue_empty"))
    other = lab.submit(hold=True)
    finish(lab)
    assert keys(lab) == []
    assert keys(lab, "armed") == [f"{asked_for}.0 queue_empty"]
    lab.restart()
    lab.ask(Release(ANN, (other,)))
    finish(lab)
    (key,) = keys(lab)
    assert facts(lab, key)["message"].endswith(f"the last was {other} (test), COMPLETED")
    tell_all(lab)
    again = lab.submit(alerting=asked("queue_empty"))
    finish(lab)
    assert keys(lab) == [f"{again}.0 queue_empty"]


def test_an_array_is_reported_as_a_whole() -> None:
    lab = Lab()
    array = lab.submit(alerting=asked("begin", "end"), array=ArraySpec("0-3"))
    finish(lab)
    finish(lab)
    assert keys(lab) == [f"{array}.0 begin", f"{array}.0 end"]


def test_a_thousand_failing_tasks_are_one_alert() -> None:
    lab = Lab(cpus=200, outcome=SimulatedOutcome(runs_s=1, exit_code=1))
    array = lab.submit(alerting=asked("fail", "end", "retry"), array=ArraySpec("0-999"))
    while not lab.store.load(ALERTS):
        lab.tick(1)
    assert keys(lab) == [f"{array}.0 fail"]
    assert facts(lab, f"{array}.0 fail")["message"].startswith("FAILED: 1000 FAILED; see which with: ")


def test_idle_gpus_are_sent_once_per_run_on_request() -> None:
    lab = Lab(outcome=SimulatedOutcome(runs_s=1000))
    told, silent = lab.submit(alerting=asked("gpu_idle")), lab.submit(alerting=asked("end"))
    alerts, state = lab.scheduler.alerts, lab.scheduler.state
    for _ in range(2):
        now = lab.clock.now()
        tick = TickTransaction(state, lab.store, lab.settings, partial(lab.scheduler.nodes, now), now)
        for job in (told, silent):
            alerts.tell(tick, state.jobs[job], "gpu_idle", "GPU 0 has done nothing for 30 min")
        lab.store.commit(tick.changes)
        alerts.committed(tick.changes)
    assert keys(lab) == [f"{told}.1 gpu_idle"]


def test_no_user_fills_the_outbox_of_another() -> None:
    lab = Lab(cpus=20, alert=AlertSettings(outbox=2))
    specs = [lab.submission(alerting=asked("begin")).specs[0]] * 5
    lab.ask(Submit(ANN, specs, lab.submission().payloads))
    assert len(keys(lab)) == 2
    assert lab.scheduler.alerts.dropped == 3
    lab.ask(lab.submission(BOB, alerting=asked("begin")))
    assert len(keys(lab)) == 3


def test_simultaneous_alerts_do_not_fill_the_outbox_and_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    lab = Lab(cpus=20, alert=AlertSettings(outbox=2))
    specs = [lab.submission(alerting=asked("begin")).specs[0]] * 5
    lab.ask(
        Submit(ANN, specs, lab.submission().payloads),
        lab.submission(BOB, alerting=asked("begin")),
    )
    assert [row.uid for row in lab.store.load(ALERTS).values()].count(BOB.uid) == 1
    assert len(keys(lab)) == 3
    assert caplog.text.count("begin dropped") == 1


# --- the administrator --------------------------------------------------------------------------------


def events(lab: Lab) -> list[str]:
    return [row.event for row in lab.store.load(ALERTS).values()]


def test_only_lost_gpus_and_drains_are_sent_to_the_admin() -> None:
    lab = Lab(alert=AlertSettings(admin=("ops",)))
    lab.tick(1)
    assert events(lab) == []
    lab.lost = {1}
    lab.tick(1)
    lab.tick(1)
    assert events(lab) == ["gpu_lost"]
    (row,) = lab.store.load(ALERTS).values()
    assert row.targets == ("ops",)
    assert ") was lost: the GPU is lost" in str(dict(row.facts)["message"])
    lab.ask(Drain(ROOT, ("0",), "smells"))
    assert events(lab) == ["gpu_lost", "gpu_drained"]
    drained = next(row for row in lab.store.load(ALERTS).values() if row.event == "gpu_drained")
    assert dict(drained.facts)["node"] == "n1"
    assert str(dict(drained.facts)["message"]).endswith(", GPU-0) was drained: smells")
    lab.lost = set()
    lab.tick(1)
    lab.tick(1)
    lab.lost = {1}
    lab.tick(1)
    assert events(lab) == ["gpu_lost", "gpu_drained", "gpu_lost"]


def messages(lab: Lab, event: str) -> list[str]:
    """What the administrator was told of this event, whether or not it was sent yet."""
    return [str(dict(row.facts)["message"]) for row in lab.store.load(ALERTS).values() if row.event == event]


def flap(lab: Lab, times: int) -> None:
    for _ in range(times):
        lab.lost = {1}
        lab.tick(1)
        lab.lost = set()
        lab.tick(1)
        lab.tick(1)


def test_a_flapping_gpu_is_sent_three_times_an_hour_and_the_last_says_so() -> None:
    lab = Lab(alert=AlertSettings(admin=("ops",)))
    flap(lab, 2)
    tell_all(lab)
    lab.restart()
    flap(lab, 5)
    tell_all(lab)
    told = messages(lab, "gpu_lost")
    assert len(told) == 3
    last = "; further alerts about this are suppressed for an hour"
    assert [text.endswith(last) for text in told] == [False, False, True]
    # Of another card it is told all the same.
    lab.lost = {0}
    lab.tick(1)
    assert len(messages(lab, "gpu_lost")) == 4
    tell_all(lab)
    lab.tick(3600)
    flap(lab, 1)
    # What was told long ago is no longer kept.
    assert len(messages(lab, "gpu_lost")) == 1


def test_a_gpu_that_keeps_memory_of_an_ended_run_is_sent_as_suspect() -> None:
    lab = Lab(alert=AlertSettings(admin=("ops",)))
    lab.submit(request=Request(gpus=1))
    lab.tick(1)
    lab.used[0] = 9000
    for _ in range(8):
        lab.tick(10)
    (message,) = messages(lab, "gpu_suspect")
    assert message.startswith("GPU 0 (")
    assert "is suspect: " in message
    assert events(lab) == ["gpu_suspect"]


def test_a_gpu_with_a_hardware_fault_is_sent_once_as_suspect_despite_its_drain() -> None:
    lab = Lab(alert=AlertSettings(admin=("ops",)))
    lab.tick(1)
    lab.xids[0] = (48,)
    for _ in range(3):
        lab.tick(1)
    (message,) = messages(lab, "gpu_suspect")
    assert message.endswith(
        "is suspect: XID 48 (memory error that cannot be corrected); once it works again: gctl undrain 0"
    )
    assert events(lab) == ["gpu_suspect"]
    lab.restart()
    lab.tick(1)
    assert events(lab) == ["gpu_suspect"]


def test_a_gpu_on_which_several_users_fail_early_is_sent_as_suspect() -> None:
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=2, exit_code=1), alert=AlertSettings(admin=("ops",)))
    for caller in (ANN, BOB):
        lab.ask(lab.submission(caller, request=Request(gpus=1)))
        lab.tick(3)
        lab.tick(1)
    (message,) = messages(lab, "gpu_suspect")
    assert "is suspect: jobs of 2 users in a row failed here" in message


def test_a_driver_that_reports_no_gpu_is_sent_and_one_late_reading_is_not() -> None:
    lab = Lab(alert=AlertSettings(admin=("ops",)))
    for count, told in ((2, 0), (3, 1)):
        lab.gpu_error = "driver and library do not fit together: reboot"
        for _ in range(count):
            lab.tick(1)
        lab.gpu_error = None
        lab.tick(1)
        assert len(messages(lab, "gpu_lost")) == told
    assert messages(lab, "gpu_lost") == ["cannot read the GPUs of n1: driver and library do not fit together: reboot"]


def test_without_a_target_the_admin_gets_no_alert() -> None:
    lab = Lab()
    lab.lost = {1}
    lab.tick(1)
    assert events(lab) == []


def test_database_trouble_is_sent_once_and_at_once() -> None:
    lab = Lab(alert=AlertSettings(admin=("ops",)))
    courier = Obliging()
    dispatcher = Dispatcher(lab.scheduler, lambda uid, settings: courier)  # type: ignore[arg-type,return-value]
    lab.store.is_full = True
    lab.ask(lab.submission())
    for _ in range(3):
        dispatcher.reconcile()
    assert [key.split()[0] for key in courier.handed] == ["database"]
    lab.store.is_full = False
    lab.ask(lab.submission())
    dispatcher.reconcile()
    assert len(courier.handed) == 1
    for _ in range(5):
        lab.tick(1)
        lab.store.is_full = True
        lab.ask(lab.submission())
        dispatcher.reconcile()
        lab.store.is_full = False
        lab.ask(lab.submission())
        dispatcher.reconcile()
    assert len(set(courier.handed)) == 3


# --- recording ----------------------------------------------------------------------------------------


def test_sent_alerts_are_not_handed_over_again_while_commits_fail() -> None:
    lab = Lab()
    job = lab.submit(alerting=asked("begin"))
    courier = Obliging()
    dispatcher = Dispatcher(lab.scheduler, lambda uid, settings: courier)  # type: ignore[arg-type,return-value]
    dispatcher.reconcile()
    lab.store.is_full = True
    for _ in range(3):
        dispatcher.reconcile()
    assert courier.handed == [f"{job}.1 begin"]
    assert keys(lab) == [f"{job}.1 begin"]
    lab.store.is_full = False
    dispatcher.reconcile()
    assert keys(lab) == []
    assert "sent begin to phone" in [event.text for event in lab.store.events(job)]


@pytest.mark.parametrize(
    ("report", "text"),
    [
        ({"outcome": "told", "tries": 3}, "sent begin to phone, at attempt 3"),
        (
            {"outcome": "failed", "tries": 1, "error": "500", "next_s": 5},
            "could not send begin to phone yet: 500; will retry",
        ),
        ({"outcome": "failed", "tries": 2, "error": "500", "next_s": 5}, None),
        ({"outcome": "gave_up", "tries": 9, "error": "500"}, "could not send begin to phone after 9 attempts: 500"),
    ],
)
def test_the_history_records_each_change(report: dict[str, Any], text: str | None) -> None:
    lab = Lab()
    job = lab.submit(alerting=asked("begin"))
    courier = Obliging()
    courier.submit = lambda alerts: []  # type: ignore[method-assign,assignment]
    dispatcher = Dispatcher(lab.scheduler, lambda uid, settings: courier)  # type: ignore[arg-type,return-value]
    dispatcher.reconcile()
    courier.reports = [{"key": f"{job}.1 begin", "target": "phone", **report}]
    dispatcher.reconcile()
    notes = [event.text for event in lab.store.events(job) if event.kind == "note"]
    assert notes == ([] if text is None else [text])
    is_settled = report["outcome"] != "failed"
    assert lab.scheduler.alerts.rows[f"{job}.1 begin"].settled == (("phone",) if is_settled else ())
    assert (lab.scheduler.alerts.trouble() is None) == (report["outcome"] == "told")


def test_a_report_of_a_removed_alert_changes_nothing() -> None:
    lab = Lab()
    lab.submit(alerting=asked("begin"))
    courier = Obliging()
    dispatcher = Dispatcher(lab.scheduler, lambda uid, settings: courier)  # type: ignore[arg-type,return-value]
    dispatcher.reconcile()
    courier.reports += [{"key": "99.1 end", "target": "phone", "outcome": "told", "tries": 1}]
    dispatcher.reconcile()
    assert keys(lab) == []


def test_changed_settings_reach_the_couriers() -> None:
    lab = Lab()
    lab.submit(alerting=asked("begin"))
    adopted: list[AlertSettings] = []
    courier = Obliging()
    courier.reconfigure = adopted.append  # type: ignore[attr-defined]
    dispatcher = Dispatcher(lab.scheduler, lambda uid, settings: courier)  # type: ignore[arg-type,return-value]
    dispatcher.reconcile()
    wanted = replace(lab.settings, alert=AlertSettings(timeout_s=3))
    lab.scheduler.settings = wanted
    lab.scheduler.signals.settings_changed.send(lab.scheduler.failures, wanted)
    assert adopted == [wanted.alert]


def test_a_shorter_wait_applies_to_pending_jobs() -> None:
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=5000), alert=AlertSettings(pending_s=6000))
    lab.submit(request=Request(gpus=1))
    job = lab.submit(request=Request(gpus=1), alerting=asked("pending"))
    wanted = replace(lab.settings, alert=AlertSettings(pending_s=60))
    lab.config = lambda: wanted
    lab.ask(Reload(Caller(os.geteuid(), "owner")))
    lab.tick(60)
    assert keys(lab) == [f"{job}.1 pending"]


def test_alerts_beyond_a_users_outbox_are_not_retried_constantly() -> None:
    lab = Lab(alert=AlertSettings(outbox=2))
    told = [Alert(f"gpu_foreign {pid}.1 @1", "gpu_foreign", ("gpu_foreign",), ANN.uid, 1.0) for pid in (7, 8, 9)]
    lab.scheduler.alerts.alert_users(told)
    lab.tick()
    assert keys(lab) == ["gpu_foreign 7.1 @1", "gpu_foreign 8.1 @1"]
    assert lab.scheduler.alerts.dropped == 1
    lab.tick()
    lab.tick()
    assert lab.scheduler.alerts.dropped == 1


def test_alerts_that_failed_to_commit_are_sent_once_possible() -> None:
    lab = Lab()
    lab.store.is_full = True
    lab.scheduler.alerts.alert_users([Alert("gpu_foreign 7.1 @1", "gpu_foreign", ("gpu_foreign",), ANN.uid, 1.0)])
    lab.tick()
    assert keys(lab) == []
    lab.store.is_full = False
    lab.tick()
    assert keys(lab) == ["gpu_foreign 7.1 @1"]
