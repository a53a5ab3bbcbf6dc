"""What a run is kept to, and which processors are its own: the pure parts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.daemon.launch.limits import PERSONAL, RunLimiter, isolation
from gpusched.engine.linux.isolation import read_list, read_processors
from gpusched.model.cluster import GpuSample, Isolation, Processor
from gpusched.model.job import GpuShare, Run
from gpusched.model.settings import IsolationSettings
from gpusched.model.value import replace
from gpusched.scheduler.isolation import as_list, choose_cpus, describe, limits_of
from gpusched.testing import job, run

SETTINGS = IsolationSettings()
FULL = Isolation("systemd", is_limited=True, can_pin=True)


def booked(number: int = 1, *, gpus: int = 0, **changes: object) -> Run:
    shares = tuple(GpuShare(f"GPU-{at}", at) for at in range(gpus))
    return replace(run(job(number)), gpus=shares, **changes)  # type: ignore[arg-type]


def sample(at: int, **changes: object) -> GpuSample:
    return replace(GpuSample(f"GPU-{at}", at, "A100", minor=7 - at), **changes)  # type: ignore[arg-type]


# --- limits -------------------------------------------------------------------------------------------


def test_requested_memory_is_the_limit() -> None:
    assert limits_of(booked(mem_mib=2048), SETTINGS, ()).mem_mib == 2048
    assert limits_of(booked(mem_mib=0), SETTINGS, ()).mem_mib is None
    with_default = replace(SETTINGS, default_mem_mib=512)
    assert limits_of(booked(mem_mib=0), with_default, ()).mem_mib == 512
    assert limits_of(booked(mem_mib=2048), with_default, ()).mem_mib == 2048
    assert limits_of(booked(mem_mib=2048), replace(SETTINGS, mem=False), ()).mem_mib is None


@pytest.mark.parametrize(("cpus", "weight"), [(0, 10), (0.5, 50), (1, 100), (8, 800), (256, 10_000)])
def test_the_cpu_weight_follows_the_cores(cpus: float, weight: int) -> None:
    assert limits_of(booked(cpus=cpus), SETTINGS, ()).cpu_weight == weight


def test_an_unset_task_limit_is_unlimited() -> None:
    assert limits_of(booked(), SETTINGS, ()).tasks == SETTINGS.tasks
    assert limits_of(booked(), replace(SETTINGS, tasks=0), ()).tasks is None


def test_gpus_are_opened_by_minor_and_an_unknown_one_opens_all() -> None:
    three, one = sample(4), sample(6)
    assert limits_of(booked(), SETTINGS, (three, one)).gpu_minors == (1, 3)
    assert limits_of(booked(), SETTINGS, ()).gpu_minors == ()
    assert limits_of(booked(), SETTINGS, (three, None)).gpu_minors is None
    assert limits_of(booked(), SETTINGS, (three, replace(one, minor=None))).gpu_minors is None
    assert limits_of(booked(), replace(SETTINGS, devices=False), (three,)).gpu_minors is None
    assert limits_of(booked(), SETTINGS, (three,)).mig == ()


def test_a_mig_instance_opens_its_gpu_and_two_nodes() -> None:
    instance = sample(7, mig_profile="2g.20gb", mig_gi=3, mig_ci=0)
    limits = limits_of(booked(), SETTINGS, (instance,))
    assert (limits.gpu_minors, limits.mig) == ((0,), ((0, 3, 0),))
    # One of which the driver does not say by which nodes it is opened could not be opened at all.
    assert limits_of(booked(), SETTINGS, (replace(instance, mig_ci=None),)).gpu_minors is None


def test_a_cgroup_is_described_in_words() -> None:
    limits = limits_of(booked(mem_mib=4096), replace(SETTINGS, private_tmp=True), (sample(1),), (0, 1, 2, 3))
    assert describe(limits) == ("kept to 4G of memory, 16384 tasks, CPUs 0-3, the GPUs that it was given, its own /tmp")
    assert describe(limits_of(booked(), SETTINGS, ())) == "kept to 16384 tasks, no GPU"
    free = replace(SETTINGS, tasks=0, devices=False)
    assert describe(limits_of(booked(), free, ())) == "kept to its share of the processors only"


@given(st.sets(st.integers(0, 300)))
def test_ids_are_written_in_kernel_format(ids: set[int]) -> None:
    assert read_list(as_list(ids)) == sorted(ids)


# --- processors ---------------------------------------------------------------------------------------

TWO_SOCKETS = [Processor(at, at % 8, at % 8 // 4) for at in range(16)]
"""Eight cores with two threads each, I and I + 8; cores 0 to 3 in node 0, 4 to 7 in node 1."""


def test_whole_cores_of_one_node_are_used_first() -> None:
    assert choose_cpus(TWO_SOCKETS, 2, ()) == (0, 8)
    assert choose_cpus(TWO_SOCKETS, 8, ()) == (0, 1, 2, 3, 8, 9, 10, 11)


def test_cores_near_the_gpu_are_preferred_when_known() -> None:
    assert choose_cpus(TWO_SOCKETS, 4, (), near={1}) == (4, 5, 12, 13)
    # Not enough there: what there is, and the rest elsewhere.
    assert choose_cpus(TWO_SOCKETS, 10, (), near={1}) == (0, 4, 5, 6, 7, 8, 12, 13, 14, 15)


def test_a_partly_used_core_is_filled_before_another() -> None:
    assert choose_cpus(TWO_SOCKETS, 1, {0}) == (8,)
    assert choose_cpus(TWO_SOCKETS, 3, {0}) == (1, 8, 9)


def test_the_node_with_least_to_spare_is_filled() -> None:
    assert choose_cpus(TWO_SOCKETS, 2, {4, 12, 5, 13}) == (6, 14)


@pytest.mark.parametrize("cpus", [0, 0.5, 1.5, 17])
def test_fractional_and_excessive_cores_are_not_pinned(cpus: float) -> None:
    assert choose_cpus(TWO_SOCKETS, cpus, ()) == ()


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 2)), min_size=1, max_size=24),
    st.integers(1, 24),
    st.sets(st.integers(0, 23)),
    st.sets(st.integers(0, 2)),
)
def test_exactly_the_requested_cores_are_pinned_or_none(
    layout: list[tuple[int, int]], wanted: int, taken: set[int], near: set[int]
) -> None:
    numa_of = dict(layout)
    processors = [Processor(at, core, numa_of[core]) for at, (core, _) in enumerate(layout)]
    free = {one.id for one in processors} - taken
    chosen = choose_cpus(processors, wanted, taken, near)
    if len(free) < wanted:
        assert chosen == ()
        return
    assert len(set(chosen)) == len(chosen) == wanted
    assert set(chosen) <= free
    near_free = {one.id for one in processors if one.id in free and one.numa in near}
    assert len(near_free & set(chosen)) == min(wanted, len(near_free)) or len(near_free) >= wanted


def test_processors_are_read_from_sys(tmp_path: Path) -> None:
    for at in range(4):
        folder = tmp_path / "cpu" / f"cpu{at}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{at % 2},{at % 2 + 2}\n")
    (tmp_path / "node" / "node1").mkdir(parents=True)
    (tmp_path / "node" / "node1" / "cpulist").write_text("1,3\n")
    found = read_processors(str(tmp_path), frozenset({0, 1, 3}))
    assert found == (Processor(0, 0, 0), Processor(1, 1, 1), Processor(3, 1, 1))
    # A kernel that tells nothing: each is a core of its own.
    assert read_processors(str(tmp_path / "none"), frozenset({5})) == (Processor(5, 5, 0),)


# --- the daemon's side --------------------------------------------------------------------------------

PINS = replace(SETTINGS, pin_cpus=True)


def test_runs_share_no_processor() -> None:
    limiter = RunLimiter(FULL, TWO_SOCKETS)
    runs = {one.id: one for one in (booked(number, cpus=4.0) for number in range(1, 6))}
    limits = [limiter.limits_for(one, PINS, {}, runs) for one in runs.values()]
    chosen = [set(limits.cpus) for limits in limits if limits is not None]
    assert [len(ids) for ids in chosen] == [4, 4, 4, 4, 0]
    assert len(set.union(*chosen)) == 16
    # The end of one gives its own back.
    del runs["2.1"]
    late = booked(6, cpus=4.0)
    limits = limiter.limits_for(late, PINS, {}, {**runs, late.id: late})
    assert limits is not None
    assert set(limits.cpus) == chosen[1]


def test_processors_of_runs_of_an_earlier_daemon_are_recovered() -> None:
    limiter = RunLimiter(FULL, TWO_SOCKETS, {41: (0, 8)}.get)  # type: ignore[arg-type]
    before = booked(1, cpus=2.0, pid=41)
    late = booked(2, cpus=2.0)
    limits = limiter.limits_for(late, PINS, {}, {before.id: before, late.id: late})
    assert limits is not None
    assert limits.cpus == (1, 9)


def test_a_run_is_pinned_near_its_gpu_and_its_cgroup_is_known() -> None:
    limiter = RunLimiter(FULL, TWO_SOCKETS)
    one = booked(1, gpus=1, cpus=2.0)
    samples = {"GPU-0": sample(0, numa=1)}
    limits = limiter.limits_for(one, PINS, samples, {one.id: one})
    assert limits is not None
    assert (limits.cpus, limits.gpu_minors) == ((4, 12), (7,))
    assert limiter.known(one.id) is limits
    assert limiter.known("9.9") is None


def test_a_repeated_start_elsewhere_gets_the_new_cgroup() -> None:
    limiter = RunLimiter(FULL, TWO_SOCKETS)
    samples = {f"GPU-{index}": sample(index, numa=1 - index, minor=index) for index in range(2)}
    for index, cpus in enumerate(((4, 12), (0, 8))):
        one = replace(booked(1, cpus=2.0), gpus=(GpuShare(f"GPU-{index}", index),))
        limits = limiter.limits_for(one, PINS, samples, {})
        assert limits is not None
        assert (limits.cpus, limits.gpu_minors) == (cpus, (index,))
        assert limiter.known(one.id) is limits
    assert limiter.limits_for(one, replace(PINS, enforce=False), samples, {}) is None
    assert limiter.known(one.id) is None


def test_unenforceable_limits_are_omitted() -> None:
    one = booked(gpus=1, mem_mib=100)
    assert RunLimiter().limits_for(one, SETTINGS, {}, {}) is None
    assert RunLimiter(FULL).limits_for(one, replace(SETTINGS, enforce=False), {}, {}) is None
    no_rules = replace(FULL, why_not_devices="the kernel takes no device rule")
    limits = RunLimiter(no_rules).limits_for(one, SETTINGS, {"GPU-0": sample(0)}, {})
    assert limits is not None
    assert (limits.mem_mib, limits.gpu_minors) == (100, None)


def test_without_kernel_cpusets_no_run_is_pinned() -> None:
    found = replace(FULL, can_pin=False)
    limits = RunLimiter(found, TWO_SOCKETS).limits_for(booked(cpus=2.0), PINS, {}, {})
    assert limits is not None
    assert limits.cpus == ()
    facts = isolation(found, PINS)
    assert (facts["cpus"], facts["memory"]) == ("weight", "cgroup")
    assert facts["why_not"] == "no dedicated processors: its control groups lack cpuset"
    assert isolation(found, SETTINGS)["why_not"] is None


def test_enforcement_is_reported_by_kind() -> None:
    assert isolation(FULL, SETTINGS) == {
        "launcher": "systemd",
        "memory": "cgroup",
        "tasks": "cgroup",
        "cpus": "weight",
        "gpus": "device rule",
        "tmp": "shared",
        "guard": [],
        "why_not": None,
    }
    free = isolation(PERSONAL, SETTINGS)
    assert {free[key] for key in ("memory", "tasks", "cpus")} == {"none"}
    assert (free["gpus"], free["why_not"]) == ("environment", "a personal daemon sets none")
    off = isolation(FULL, replace(SETTINGS, enforce=False))
    assert (off["memory"], off["gpus"], off["why_not"]) == (
        "none",
        "environment",
        "switched off by [isolation] enforce",
    )
    some = replace(SETTINGS, mem=False, tasks=0, pin_cpus=True, devices=False, private_tmp=True)
    found = isolation(FULL, some)
    assert [found[key] for key in ("memory", "tasks", "cpus", "gpus", "tmp")] == [
        "none",
        "none",
        "own",
        "environment",
        "own",
    ]
