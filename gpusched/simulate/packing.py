"""Jobs that arrive until a cluster is full and never leave: how many of its GPUs each strategy of placement gives away.

One job after the other is placed by the daemon's own placement, or dropped where it fits nowhere. The jobs are those
of a list, topped up with copies drawn from it until they ask for so many times the GPUs that there are, in random
order. What counts is the part of all GPUs that is given away.

Source: Weng et al., Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient
Descent (USENIX ATC 2023), section 6.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpusched.model.cluster import NodeView
from gpusched.model.job import Request
from gpusched.model.settings import SPARING_STRATEGIES, STRATEGIES, GpuSettings, PlacementSettings, Settings
from gpusched.model.value import replace
from gpusched.policy.draft import Booking, Draft, Layout
from gpusched.policy.finder import Finder
from gpusched.policy.fragmentation import COVERED, Fragmentation, Typical
from gpusched.policy.need import Need
from gpusched.policy.wanted import Wanted, insistence, micros_asked
from gpusched.simulate.cluster import read_nodes
from gpusched.simulate.tables import read_pods
from gpusched.simulate.trace import TraceJob

RANDOM = "random"
RULES = (RANDOM, *STRATEGIES)
"""Any node that has room, against which the others are measured, and the strategies of [placement]."""

FIRST_SEED = 42
DEMAND = 1.3
"""GPUs asked for in all, as a multiple of those there are."""

USER = 1000
_VRAM_MIB = 100_000
"""Of every card: a fraction of a card books the same part of its VRAM, so that the size does not matter."""

_TOLD_EVERY = 256

Progress = Callable[[int, int], None]
"""Told now and then how many jobs have arrived, and of how many."""


# --- the jobs -----------------------------------------------------------------------------------------


def cluster_of(path: Path) -> tuple[NodeView, ...]:
    """Nodes of a file, with the model of their cards as a label, which jobs may insist on. Raises: see `read_nodes`."""
    return tuple(
        replace(
            node,
            gpus=tuple(replace(card, vram_total_mib=_VRAM_MIB) for card in node.gpus),
            labels=tuple(sorted({card.name for card in node.gpus if card.name})),
        )
        for node in read_nodes(path)
    )


def jobs_of(path: Path) -> list[Request]:
    """What the tasks of a list ask for. Raises: see `read_pods`."""
    return [request_of(job) for job in read_pods(path).jobs]


def request_of(job: TraceJob) -> Request:
    """What one task asks for: any of the models that will do is as good as another."""
    return Request(
        gpus=job.gpus,
        gpu_fraction=job.gpu_fraction or None,
        cpus=job.cpus,
        mem_mib=job.mem_mib,
        constraint="|".join(job.gpu_types) or None,
    )


def gpus_asked(request: Request) -> float:
    """GPUs, a fraction as the part that it is."""
    return request.gpus if request.gpu_fraction is None else request.gpu_fraction


def arrivals(jobs: Sequence[Request], most_gpus: float, seed: int) -> list[Request]:
    """The list, topped up with copies until so many GPUs are asked for, in random order; cut there if it is longer."""
    chance = random.Random(seed)
    made = list(jobs)
    asked = sum(map(gpus_asked, made))
    while asked < most_gpus:
        one = chance.choice(jobs)
        made.append(one)
        asked += gpus_asked(one)
    chance.shuffle(made)
    asked = 0.0
    for count, one in enumerate(made):
        if asked >= most_gpus:
            return made[:count]
        asked += gpus_asked(one)
    return made


def usual(jobs: Sequence[Request]) -> Typical:
    """The commonest kinds of job that together make up nearly all of a list, with how often they come."""
    counts: Counter[Need] = Counter(Need.of(request, USER) for request in jobs)
    wanted = COVERED * counts.total()
    found = []
    for need, count in counts.most_common():
        if wanted <= 0:
            break
        found.append((need, count))
        wanted -= count
    total = sum(count for _, count in found)
    return tuple((need, count / total) for need, count in found)


def wanted_of(jobs: Sequence[Request]) -> Wanted:
    """What a list asks for, and insists on."""
    wanted = Wanted()
    for request in jobs:
        if request.gpus:
            wanted.add(insistence(request), micros_asked(request))
    return wanted


# --- filling ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Filled:
    """What one order of arrival came to."""

    at_full: float
    """Part of all GPUs given away when as many had been asked for as there are."""
    at_end: float
    """The same when all had arrived."""
    fragments: float
    """Part of all GPUs that are free and of no use to the usual jobs in the end; see `policy.fragmentation`."""
    placed: int
    dropped: int
    seconds: float


def fill(
    nodes: Sequence[NodeView],
    jobs: Sequence[Request],
    rule: str,
    typical: Typical,
    *,
    wanted: Wanted | None = None,
    seed: int = FIRST_SEED,
    progress: Progress | None = None,
) -> Filled:
    """Place one job after the other by this rule.

    Args:
        typical: the usual jobs, for the rules that look at them.
        wanted: what is asked for, for those that leave scarce cards to who insists on them; None: they leave none.
        seed: what the rule "random" draws with.
    """
    strategy = "first" if rule == RANDOM else rule
    # Fractions are of the whole card, as in the lists.
    no_headroom = replace(GpuSettings(), share_headroom_mib=0)
    layout = Layout(nodes, Settings(placement=PlacementSettings(strategy), gpu=no_headroom))
    layout.typical = typical
    if strategy in SPARING_STRATEGIES:
        layout.wanted = wanted
    finder = Finder(Draft(layout))
    chance = random.Random(seed)
    capacity = len(layout.cards)
    asked = given = at_full = 0.0
    placed = dropped = 0
    # Nothing is given back, so what has once found no place never will.
    hopeless: set[Request] = set()
    needs: dict[Request, Need] = {}
    began = time.perf_counter()
    for count, request in enumerate(jobs):
        gpus = gpus_asked(request)
        asked += gpus
        booking: Booking | None = None
        if request not in hopeless:
            need = needs.get(request) or needs.setdefault(request, Need.of(request, USER))
            if rule == RANDOM:
                places = finder.places(need)
                booking = chance.choice(places) if places else None
            else:
                booking = finder.find(need)
        if booking is None:
            hopeless.add(request)
            dropped += 1
        else:
            finder.book(booking)
            given += gpus
            placed += 1
        if asked <= capacity:
            at_full = given
        if progress is not None and count % _TOLD_EVERY == 0:
            progress(count, len(jobs))
    seconds = time.perf_counter() - began
    measure = Fragmentation(layout, typical)
    lost = sum(measure.amount(finder.draft, node) for node in range(len(layout.nodes)))
    return Filled(at_full / capacity, given / capacity, lost / capacity, placed, dropped, seconds)
