"""Settings read again while the daemon runs: what changes, what stays, and that a bad file changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
from lab import ANN, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon.checks import broken_promises, daemon_checks
from gpusched.daemon.reload import reread
from gpusched.errors import Forbidden, Refused, UsageError
from gpusched.model.commands import Caller, Reload
from gpusched.model.queue_settings import QosSettings, QueueSettings
from gpusched.model.settings import (
    AccessSettings,
    DaemonSettings,
    DefaultSettings,
    GpuSettings,
    LifeSettings,
    NodeSettings,
    Settings,
)
from gpusched.model.snapshot import Urgency
from gpusched.model.states import JobState
from gpusched.model.value import replace
from gpusched.testing import request

ROOT = Caller(0, "root")


def reload(lab: Lab, **sections: Any) -> Any:
    wanted = replace(lab.scheduler.settings, **sections)
    lab.config = lambda: wanted
    (answer,) = lab.ask(Reload(ROOT))
    return answer


def test_new_settings_apply_at_once() -> None:
    lab = Lab(cpus=1, outcome=SimulatedOutcome(runs_s=1000))
    first, second = lab.submit(), lab.submit()
    assert lab.job(second).state is JobState.PENDING
    answer = reload(lab, node=NodeSettings(name="n1", cpus=2.0), default=DefaultSettings(queue="q"))
    assert answer == {"changed": ["default.queue", "node.cpus"], "needs_restart": []}
    assert [lab.job(job_id).state for job_id in (first, second)] == [JobState.RUNNING] * 2


def test_each_changed_or_removed_queue_is_named() -> None:
    lab = Lab(queue={"a": QueueSettings("a"), "b": QueueSettings("b")})
    answer = reload(lab, queue={"b": QueueSettings("b", max_gpus=1), "c": QueueSettings("c")})
    assert answer["changed"] == ["queue.a", "queue.b", "queue.c"]


def test_settings_that_cannot_change_are_named_and_kept() -> None:
    lab = Lab()
    gpu = GpuSettings(source="none", free_polls=1, foreign_mib=7)
    daemon = DaemonSettings(log_level="debug", poll_s=3.0)
    answer = reload(lab, gpu=gpu, daemon=daemon, node=NodeSettings(name="other", cpus=8))
    assert answer == {
        "changed": ["daemon.poll_s", "gpu.foreign_mib"],
        "needs_restart": ["daemon.log_level", "gpu.source", "node.name"],
    }
    running = lab.scheduler.settings
    assert (running.gpu.source, running.node.name, running.daemon.log_level) == ("auto", "n1", "info")
    assert (running.gpu.foreign_mib, running.daemon.poll_s) == (7, 3.0)


def test_an_invalid_file_is_refused_in_a_sentence_and_changes_nothing() -> None:
    lab = Lab()
    before = lab.scheduler.settings

    def broken() -> Settings:
        raise UsageError("daemon.poll_s is -1 in file x; it must be above 0", "see the reference")

    lab.config = broken
    (answer, other) = lab.ask(Reload(ROOT), lab.submission())
    assert isinstance(answer, UsageError)
    assert "daemon.poll_s is -1" in answer.message
    assert lab.scheduler.settings is before
    assert other["ids"] == [1]


def test_contradictory_guarantees_are_refused() -> None:
    lab = Lab()
    queues = {"a": QueueSettings("a", guaranteed_gpus=1), "b": QueueSettings("b", parent="a", guaranteed_gpus=2)}
    answer = reload(lab, queue=queues)
    assert isinstance(answer, UsageError)
    assert answer.message.startswith("queue.a.guaranteed_gpus: the queues below a are guaranteed")
    assert lab.scheduler.settings.queue == {}


def test_an_invalid_gpu_group_is_refused() -> None:
    lab = Lab()
    answer = reload(lab, queue={"vision": QueueSettings("vision", cells=("four",))})
    assert isinstance(answer, UsageError)
    assert "queue.vision.cells: 'four' is not a group of GPUs" in answer.message
    assert lab.scheduler.settings.queue == {}


def test_the_doctor_names_missing_gpu_groups() -> None:
    lab = Lab(queue={"vision": QueueSettings("vision", cells=("2",))})
    assert broken_promises(lab.scheduler) == []
    lab = Lab(queue={"vision": QueueSettings("vision", cells=("n1:4",))})
    assert broken_promises(lab.scheduler)[-1] == (
        "queue.vision.cells: 'n1:4' asks for 4 linked GPUs, and n1 has at most 2"
    )


def test_the_doctor_names_guarantees_the_machine_cannot_keep() -> None:
    lab = Lab(gpus=2, queue={"a": QueueSettings("a", guaranteed_gpus=2)})
    assert broken_promises(lab.scheduler) == []
    lab = Lab(gpus=2, queue={"a": QueueSettings("a", guaranteed_gpus=3)})
    (broken,) = broken_promises(lab.scheduler)
    assert "guaranteed" in broken
    (check,) = [check for check in daemon_checks(lab.ticker) if check.check == "queues"]
    assert (check.ok, check.text) == (False, broken)


def test_the_doctor_names_a_missing_admin_group() -> None:
    def access(group: str | None) -> tuple[str, str]:
        lab = Lab(access=AccessSettings(admin_group=group))
        (check,) = [check for check in daemon_checks(lab.ticker) if check.check == "access"]
        return check.level, check.text

    assert access("no-such-group") == ("warn", "group no-such-group does not exist, so only root is an admin")
    assert access("daemon") == ("ok", "members of group daemon are admins")
    assert access(None)[0] == "ok"


def test_only_the_owner_and_root_may_reload(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab()
    monkeypatch.setattr("os.geteuid", lambda: 500)
    (refused, own, root) = lab.ask(Reload(ANN), Reload(Caller(500, "daemon")), Reload(ROOT))
    assert isinstance(refused, Forbidden)
    assert "ann" in refused.message
    assert own == root == {"changed": [], "needs_restart": []}


def test_a_scheduler_without_a_file_says_so() -> None:
    with pytest.raises(Refused, match="config file"):
        reread(Reload(ROOT), Settings(), None, lambda settings: ())


def test_new_grace_and_tiers_apply_to_existing_jobs() -> None:
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=1000), qos={"b": QosSettings("b", tier=0)})
    lab.submit(request=request(gpus=1))
    parent = lab.submit(request=request(gpus=1))
    lab.submit(request=request(gpus=1), qos="b", dependency=f"afterok:{parent}")
    state = lab.scheduler.state
    assert (state.holds["1.1"].grace_s, state.inheritance.inherited(parent)) == (30.0, None)
    reload(lab, life=LifeSettings(grace_s=5.0), qos={"b": QosSettings("b", tier=1)})
    assert (state.holds["1.1"].grace_s, state.inheritance.inherited(parent)) == (5.0, Urgency(0, "b"))
    key = state.class_of(parent)
    assert key is not None
    assert key.inherited == Urgency(0, "b")
    reload(lab, qos={"b": QosSettings("b", tier=0)})
    key = state.class_of(parent)
    assert key is not None
    assert key.inherited is None


def test_gpus_are_judged_by_the_new_settings() -> None:
    lab = Lab(gpus=1)
    lab.used[0] = 500
    lab.tick()
    (view,) = lab.scheduler.nodes(lab.clock.now())[0].gpus
    assert view.why_not_whole is None
    reload(lab, gpu=replace(lab.scheduler.settings.gpu, foreign_mib=100))
    lab.tick(1)
    (view,) = lab.scheduler.nodes(lab.clock.now())[0].gpus
    assert view.why_not_whole is not None


def test_guarantees_the_machines_cannot_keep_are_refused_and_the_settings_stay() -> None:
    lab = Lab()
    before = lab.scheduler.settings
    answer = reload(lab, queue={"default": QueueSettings("default", guaranteed_cpus=4096.0)})
    assert isinstance(answer, Refused)
    assert "queue default is guaranteed 4096 CPUs, but the machines have" in answer.message
    assert lab.scheduler.settings == before


def test_guarantees_are_admitted_while_the_gpus_are_unreadable() -> None:
    lab = Lab()
    lab.gpu_error = "driver is broken"
    answer = reload(lab, queue={"default": QueueSettings("default", guaranteed_gpus=64.0)})
    assert answer == {"changed": ["queue.default"], "needs_restart": []}
