"""Generated machines, queues and lives of jobs."""

from __future__ import annotations

from hypothesis import strategies as st

from gpusched import testing
from gpusched.model.cluster import Allocation, GpuView, HostSample, JobTerms, NodeView
from gpusched.model.job import Job, Request
from gpusched.model.planner_settings import CeilingSettings, PrioritySettings
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Plan, Snapshot
from gpusched.model.value import replace
from gpusched.scheduler.planner import decide
from gpusched.testing import NOW, gpu_view, job

USERS = (1000, 1001, 1002)
TYPES = ("NVIDIA A100-SXM4-80GB", "Tesla T4")
LIMITS = (None, 60, 600, 3600)


@st.composite
def gpus(draw: st.DrawFn, node_name: str, index: int) -> GpuView:
    """A card that is well, most of the time."""
    return gpu_view(
        index,
        node_name,
        name=draw(st.sampled_from(TYPES)),
        vram_total_mib=draw(st.sampled_from([16_384, 24_576, 81_920, 81_920, None])),
        foreign_mib=draw(st.sampled_from([0, 0, 0, 700, 9000])),
        why_not=draw(st.sampled_from([None, None, None, None, "drained"])),
        why_not_whole=draw(st.sampled_from([None, None, None, None, "in foreign use"])),
        can_share=draw(st.sampled_from([True, True, True, False])),
        is_present=draw(st.sampled_from([True, True, True, True, False])),
        utilisation=draw(st.sampled_from([None, 0.0, 0.9])),
    )


@st.composite
def nodes(draw: st.DrawFn, most: int = 3) -> tuple[NodeView, ...]:
    """A few nodes with up to four cards each, of some nodes without memory of their own."""
    made = []
    for number in range(draw(st.integers(1, most))):
        name = f"n{number}"
        cards = [draw(gpus(name, index)) for index in range(draw(st.integers(0, 4)))]
        mem_mib = draw(st.sampled_from([0, 1000, 8192, 32_768]))
        if draw(st.sampled_from([False, False, False, True])):
            cards = [replace(card, has_host_memory=True, vram_total_mib=mem_mib) for card in cards]
        made.append(
            testing.node(
                name,
                cards,
                cpus=draw(st.sampled_from([1.0, 4.0, 7.5])),
                mem_mib=mem_mib,
                why_not=draw(st.sampled_from([None, None, None, None, None, "drained"])),
                gpu_error=draw(st.sampled_from([None, None, None, None, None, "no driver"])),
                load=draw(st.sampled_from([None, _load(name, 0.1), _load(name, 0.9)])),
            )
        )
    return tuple(made)


def _load(name: str, cpu_fraction: float) -> HostSample:
    return HostSample(NOW, name, 4, 8192, 4096, cpu_fraction=cpu_fraction, disk_mib_s=1.0, net_mib_s=1.0)


def requests() -> st.SearchStrategy[Request]:
    """Whole cards, slices, fractions, or no card at all."""
    cpus = st.sampled_from([0.0, 0.1, 1.0, 2.5, 4.0])
    mem_mib = st.sampled_from([0, 1, 900, 4096])
    kind = st.sampled_from([None, None, "a100", "T4"])
    count = st.integers(1, 4)
    return st.one_of(
        st.builds(Request, cpus=cpus, mem_mib=mem_mib),
        st.builds(
            Request,
            gpus=count,
            gpu_type=kind,
            min_vram_mib=st.sampled_from([None, 20_000]),
            cpus=cpus,
            mem_mib=mem_mib,
        ),
        st.builds(
            Request,
            gpus=count,
            gpu_type=kind,
            vram_mib=st.sampled_from([1, 8000, 24_000]),
            cpus=cpus,
            mem_mib=mem_mib,
        ),
        st.builds(
            Request,
            gpus=st.just(1),
            gpu_fraction=st.sampled_from([0.1, 0.5, 1 / 3, 0.9]),
            cpus=cpus,
            mem_mib=mem_mib,
        ),
    )


@st.composite
def queues(draw: st.DrawFn, most: int = 12) -> list[Job]:
    """Waiting jobs, several of a kind."""
    kinds = [
        (draw(requests()), draw(st.sampled_from(USERS)), draw(st.sampled_from(LIMITS)))
        for _ in range(draw(st.integers(1, 5)))
    ]
    made = []
    for number in range(1, draw(st.integers(1, most)) + 1):
        request, uid, limit_s = draw(st.sampled_from(kinds))
        made.append(
            job(
                number,
                uid=uid,
                request=request,
                time_limit_s=limit_s,
                nice=draw(st.sampled_from([0, 0, 0, -50, 700])),
                submit_at=NOW - draw(st.sampled_from([0.0, 1.0, 500.0, 90_000.0])),
            )
        )
    return made


def settings() -> st.SearchStrategy[Settings]:
    """Defaults, and some that turn something on or off."""
    usual = Settings()
    ceilings = CeilingSettings(cpu_fraction=0.5, mem_fraction=0.9, gpu_fraction=0.5)
    return st.sampled_from(
        [
            usual,
            usual,
            replace(usual, priority=PrioritySettings(backfill=False)),
            replace(usual, ceiling=ceilings),
            replace(usual, priority=PrioritySettings(weight_age=0.0)),
        ]
    )


def held_by(plan: Plan, waiting: list[Job], now: float) -> list[Allocation]:
    """What the starts of a plan hold."""
    jobs = {one.id: one for one in waiting}
    held = []
    for start in plan.starts:
        one, place = jobs[start.job_id], start.placement
        limit_s = one.spec.time_limit_s
        held.append(
            Allocation(
                job_id=one.id,
                terms=JobTerms(one.uid),
                node=place.node,
                gpus=place.gpus,
                cpus=place.cpus,
                mem_mib=place.mem_mib,
                start_at=now,
                expected_end_at=None if limit_s is None else now + limit_s,
            )
        )
    return held


@st.composite
def snapshots(draw: st.DrawFn) -> tuple[Snapshot, list[Job]]:
    """A snapshot with running jobs that the policy itself placed, and the jobs that wait in it."""
    machines = draw(nodes())
    early = [replace(one, id=one.id + 100) for one in draw(queues())]
    healthy = tuple(replace(one, load=None) for one in machines)
    first = decide(testing.snapshot(*healthy, waiting=early), Settings())
    ago = draw(st.sampled_from([0.0, 30.0, 5000.0]))
    running = [
        replace(
            held,
            start_at=NOW - ago,
            expected_end_at=None if held.expected_end_at is None else held.expected_end_at - ago,
        )
        for held in held_by(first, early, NOW)
    ]
    waiting = draw(queues())
    front = draw(st.sampled_from([None, None, 1, 2]))
    return testing.snapshot(*machines, running=running, waiting=waiting, front=front), waiting
