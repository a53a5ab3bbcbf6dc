"""`python -m gpusched.bench.placement [NODES PODS]`: how many of a cluster's GPUs each strategy can give away.

Jobs arrive one after the other and never leave; one that fits nowhere is dropped. What counts is the part of
all GPUs that is allocated when as many have been asked for as there are, and when more have. The jobs are those
of a list in the format of the openb traces (CSV, also compressed with gzip), topped up with copies drawn from it
and shuffled; without a list they are made up.

NODES has the columns cpu_milli, memory_mib, gpu and model; PODS has cpu_milli, memory_mib, num_gpu, gpu_milli
(1000 is a whole GPU) and perhaps gpu_spec (models that will do, with `|` between them).
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpusched.model.cluster import GpuView, NodeView
from gpusched.model.job import Request
from gpusched.model.settings import GpuSettings, PlacementSettings, Settings
from gpusched.policy.draft import Draft, Layout
from gpusched.policy.fragmentation import MOST_TYPICAL, Typical, most_typical
from gpusched.policy.placement import Need, find

STRATEGIES = ("first", "pack", "spread", "best_fit", "fgd")
USER = 1000
_VRAM_MIB = 100_000
"""Of every card: a fraction of a card books the same part of its VRAM, so that the size does not matter."""


# --- workloads ----------------------------------------------------------------------------------------


def read_nodes(rows: Iterable[Mapping[str, str]]) -> tuple[NodeView, ...]:
    """Nodes in the order of the file, which is that of their names."""
    return tuple(
        _node(number, int(row["cpu_milli"]), int(row["memory_mib"]), int(row["gpu"]), row["model"])
        for number, row in enumerate(rows)
    )


def _node(number: int, cpu_milli: int, mem_mib: int, gpus: int, model: str) -> NodeView:
    name = f"node{number:05}"
    cards = tuple(GpuView(f"{name}-{index}", index, model, _VRAM_MIB) for index in range(gpus))
    return NodeView(name, cpu_milli / 1000, mem_mib, cards, labels=(model,) if model else ())


def read_jobs(rows: Iterable[Mapping[str, str]]) -> list[Request]:
    """Requests in the order of the file."""
    return [_job(row) for row in rows]


def _job(row: Mapping[str, str]) -> Request:
    gpus, milli = int(row["num_gpu"]), int(row.get("gpu_milli") or 0)
    return Request(
        gpus=gpus,
        gpu_fraction=milli / 1000 if gpus == 1 and 0 < milli < 1000 else None,
        cpus=int(row["cpu_milli"]) / 1000,
        mem_mib=int(row["memory_mib"]),
        constraint=row.get("gpu_spec") or None,
    )


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, by column."""
    data = path.read_bytes()
    text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    return list(csv.DictReader(io.StringIO(text.decode())))


def made_up() -> tuple[tuple[NodeView, ...], list[Request]]:
    """48 nodes of four kinds, and jobs mostly for part of a card or one, some for two, four or eight."""
    kinds = (
        (16_000, 131_072, 2, "T4"),
        (64_000, 262_144, 4, "V100"),
        (96_000, 524_288, 8, "A100"),
        (32_000, 131_072, 4, "P100"),
    )
    nodes = tuple(_node(number, *kinds[number % len(kinds)]) for number in range(48))
    chance = random.Random(1)
    jobs = []
    for _ in range(2000):
        gpus, fraction = chance.choices(
            ((1, 0.2), (1, 0.33), (1, 0.5), (1, 0.8), (1, None), (2, None), (4, None), (8, None), (0, None)),
            (8, 10, 12, 6, 40, 8, 4, 3, 9),
        )[0]
        cpus = chance.choice((2, 4, 8)) if gpus < 2 else 4 * gpus
        jobs.append(Request(gpus=gpus, gpu_fraction=fraction, cpus=cpus, mem_mib=4096 * chance.choice((1, 2, 4))))
    return nodes, jobs


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


# --- filling --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Filled:
    """What was allocated, as parts of all GPUs."""

    at_full: float
    """When as many GPUs had been asked for as there are."""
    at_end: float
    placed: int
    dropped: int
    seconds: float


def fill(nodes: Sequence[NodeView], jobs: Sequence[Request], strategy: str, typical: Typical) -> Filled:
    """Place one job after the other by this strategy."""
    settings = replace(
        Settings(), placement=PlacementSettings(strategy), gpu=replace(GpuSettings(), share_headroom_mib=0)
    )
    layout = Layout(nodes, settings)
    layout.typical = typical
    draft = Draft(layout)
    capacity = len(layout.cards)
    asked = given = at_full = 0.0
    placed = dropped = 0
    # Nothing is given back, so what has once found no place never will.
    hopeless: set[object] = set()
    began = time.perf_counter()
    for request in jobs:
        gpus = gpus_asked(request)
        booking = None
        if request not in hopeless:
            booking = find(draft, Need.of(request, USER))
        asked += gpus
        if booking is None:
            hopeless.add(request)
            dropped += 1
        else:
            draft.book(booking)
            given += gpus
            placed += 1
        if asked <= capacity:
            at_full = given
    seconds = time.perf_counter() - began
    return Filled(at_full / capacity, given / capacity, placed, dropped, seconds)


def usual(jobs: Sequence[Request], most: int) -> Typical:
    """The commonest kinds of job on a list."""
    counts: Counter[Need] = Counter(Need.of(request, USER) for request in jobs)
    return most_typical({need: float(count) for need, count in counts.items()}, most)


def compare(
    nodes: Sequence[NodeView],
    jobs: Sequence[Request],
    *,
    strategies: Sequence[str] = STRATEGIES,
    seeds: Sequence[int] = (42,),
    demand: float = 1.3,
    most_typical_jobs: int = MOST_TYPICAL,
) -> dict[str, list[Filled]]:
    """Fill the cluster by each strategy, once for each seed, and print a line for each."""
    capacity = sum(len(node.gpus) for node in nodes)
    print(f"{len(nodes)} nodes, {capacity} GPUs, {len(jobs)} jobs on the list, {len(seeds)} orders of arrival")
    typical = usual(jobs, most_typical_jobs)
    found: dict[str, list[Filled]] = {}
    for strategy in strategies:
        runs = [fill(nodes, arrivals(jobs, demand * capacity, seed), strategy, typical) for seed in seeds]
        found[strategy] = runs
        full = [100 * run.at_full for run in runs]
        end = [100 * run.at_end for run in runs]
        each = sum(run.seconds for run in runs) / sum(run.placed + run.dropped for run in runs)
        print(
            f"{strategy:<10} allocated {_mean(full):6.2f} % of GPUs at 100 % of demand, {_mean(end):6.2f} % "
            f"(from {min(end):.2f} to {max(end):.2f}) at {demand:.0%}; {1e3 * each:.2f} ms a job",
            flush=True,
        )
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def main(argv: Sequence[str] = ()) -> None:
    """Compare the strategies on a list of jobs, or on made-up ones."""
    parser = argparse.ArgumentParser(prog="python -m gpusched.bench.placement")
    parser.add_argument("tables", nargs="*", metavar="FILE", help="NODES.csv and PODS.csv, also .gz; both or none")
    parser.add_argument(
        "--seeds", type=int, default=0, help="orders of arrival to try; default: 10 made up, 1 of a file"
    )
    parser.add_argument("--demand", type=float, default=1.3, help="GPUs asked for as a multiple of those there are")
    parser.add_argument("--strategy", action="append", choices=STRATEGIES, help="only this one; may be repeated")
    parser.add_argument("--typical", type=int, default=MOST_TYPICAL, help="kinds of usual jobs that fgd looks at")
    options = parser.parse_args(list(argv))
    if len(options.tables) not in (0, 2):
        parser.error("give two files, the nodes and the jobs, or none")
    if options.tables:
        nodes, jobs = (read_table(Path(path)) for path in options.tables)
        cluster, waiting = read_nodes(nodes), read_jobs(jobs)
    else:
        cluster, waiting = made_up()
    compare(
        cluster,
        waiting,
        strategies=options.strategy or STRATEGIES,
        seeds=range(42, 42 + (options.seeds or (1 if options.tables else 10))),
        demand=options.demand,
        most_typical_jobs=options.typical,
    )


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
