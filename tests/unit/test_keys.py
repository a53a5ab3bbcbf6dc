"""Keys within one turn of the daemon, and whose jobs may be repeated."""

from __future__ import annotations

from typing import Any

import pytest

from gpusched.api.resubmit import read_resubmission
from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.state import DaemonState
from gpusched.daemon.verbs import apply
from gpusched.errors import Forbidden, UsageError
from gpusched.lifecycle.transitions import new_job
from gpusched.model.cluster import NodeView
from gpusched.model.commands import ENDED, FAILED, NEVER, Caller, Submit
from gpusched.model.job import ArraySpec, JobSpec, Launch, Request
from gpusched.model.settings import Settings
from gpusched.store.sqlite import SqliteStore

ALICE, BOB = Caller(1000, "alice"), Caller(1001, "bob")
NODE = NodeView(name="lab1", cpus=8, mem_mib=1024, gpus=())


def spec(key: str | None = None, **parts: Any) -> JobSpec:
    launch = Launch(("true",), None, None, "0" * 64, "/")
    return JobSpec(name="x", request=parts.pop("request", Request()), launch=launch, key=key, **parts)


def a_turn(store: SqliteStore, state: DaemonState | None = None) -> TickTransaction:
    return TickTransaction(state or DaemonState.load(store, 100.0), store, Settings(), lambda: (NODE,), 100.0)


def submit(tick: TickTransaction, caller: Caller, *specs: JobSpec, again: str = NEVER) -> dict[str, Any]:
    return apply(Submit(caller, specs, {}, again), tick)


def test_commands_of_one_tick_see_each_others_keys() -> None:
    tick = a_turn(SqliteStore.in_memory())
    assert submit(tick, ALICE, spec("k")) == {"ids": [1], "notes": []}
    assert submit(tick, ALICE, spec("k"))["ids"] == [1]
    assert submit(tick, BOB, spec("k")) == {"ids": [2], "notes": []}
    assert submit(tick, ALICE, spec("other")) == {"ids": [3], "notes": []}
    assert submit(tick, ALICE, spec()) == {"ids": [4], "notes": []}
    assert len(tick.changes.jobs) == 4


def test_a_key_is_found_in_the_table_after_a_restart() -> None:
    store = SqliteStore.in_memory()
    tick = a_turn(store)
    submit(tick, ALICE, spec("k"))
    store.commit(tick.changes)
    assert submit(a_turn(store), ALICE, spec("k"))["existing"] is True


def test_a_job_that_ended_in_this_tick_counts_as_ended() -> None:
    store = SqliteStore.in_memory()
    tick = a_turn(store)
    submit(tick, ALICE, spec("k"))
    store.commit(tick.changes)
    tick = a_turn(store)
    tick.cancel(tick.state.jobs[1], "alice")
    assert submit(tick, ALICE, spec("k"))["ids"] == [1]
    assert submit(tick, ALICE, spec("k"), again=FAILED)["ids"] == [2]
    assert submit(tick, ALICE, spec("k"), again=ENDED)["ids"] == [2]


def test_terms_that_differ_are_named() -> None:
    tick = a_turn(SqliteStore.in_memory())
    submit(tick, ALICE, spec("k"))
    found = submit(tick, ALICE, spec("k", nice=5, request=Request(cpus=2)))
    assert found["differs"] == ["cpus", "nice"]


def test_only_owners_repeat_jobs() -> None:
    tick = a_turn(SqliteStore.in_memory())
    submit(tick, ALICE, spec())
    job = tick.changes.jobs[1]
    with pytest.raises(Forbidden, match="job 1 belongs to alice, not to bob"):
        read_resubmission([job], {}, BOB, Settings(), tick.store)
    assert read_resubmission([job], {}, ALICE, Settings(), tick.store).specs == (job.spec,)


def test_a_repeat_cannot_change_the_command() -> None:
    tick = a_turn(SqliteStore.in_memory())
    submit(tick, ALICE, spec())
    for change in ({"argv": ["x"]}, {"script": "#!/bin/sh\n"}):
        with pytest.raises(UsageError, match="cannot change"):
            read_resubmission([tick.changes.jobs[1]], change, ALICE, Settings(), tick.store)


def test_every_part_of_a_request_survives_a_repeat() -> None:
    request = Request(
        gpus=2,
        gpu_type="a100",
        min_vram_mib=5,
        cpus=0.5,
        mem_mib=7,
        nodes=3,
        is_linked=True,
        is_exclusive=True,
        constraint="a&b",
        prefer="c",
        nodelist=("n1", "n2", "n3"),
        exclude=("n9",),
        licenses=(("m", 2),),
        resources=(("r", 1),),
    )
    tick = a_turn(SqliteStore.in_memory())
    for wanted in (request, Request(gpus=1, gpu_fraction=0.5), Request(gpus=2, vram_mib=64), Request(cpus=0)):
        old = spec(request=wanted, array=ArraySpec("0-3", throttle=2), ignore_idle=True, account="a", qos="q")
        tick.put_job(new_job(9, ALICE, old, tick.now))
        found = read_resubmission([tick.changes.jobs[9]], {}, ALICE, Settings(), tick.store).specs[0]
        assert found == old
