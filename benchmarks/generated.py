"""Cases drawn from stated distributions, for what the traces lack: small clusters, overload, floods, jobs of seconds.

    flood        thousands of short jobs of one GPU by one user; wide jobs of the same or another need all nodes
    seconds      jobs of seconds on one or two nodes, as in tests and tutorials, and wide ones among them
    minutes      a lab of twelve users on two to four nodes: jobs of minutes by day, wide ones among them
    two groups   one group with short jobs of one GPU, another with long ones of half a node to all nodes
    lublin       Lublin and Feitelson, The workload on parallel supercomputers: modeling the characteristics of rigid
                 jobs (JPDC 2003): sizes by their two-stage uniform distribution over the powers of two, run times by
                 their hyper-gamma distribution, which depends on the size, arrivals by their gamma distribution; gangs

Run times are lognormal but in `lublin`; arrivals are uniform or in bursts, stretched so that the jobs offer the load
that the case names. All is drawn from fixed seeds. In each family every other case is for choosing constants, and the
rest for reporting (`--half`). They are harsher than recordings: a user's run times have only their
distribution in common, so that no prediction can be good, and `easy` knows each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import exp, log, log2
from random import Random

from benchmarks.cases import GPUS_A_NODE, Case
from benchmarks.fairness import DAY_S, HOUR_S, made
from gpusched.addons.simulate.cluster import nodes_of
from gpusched.addons.simulate.trace import TraceJob

Drawn = tuple[float, float, int, str, str]
"""Arrival, run time, GPUs, user, account."""

USUAL_GRAIN_S, SECONDS_GRAIN_S, MINUTES_GRAIN_S = 600.0, 10.0, 120.0


def _case(name: str, drawn: list[Drawn], nodes: int, load: float, grain_s: float, gpus: int = GPUS_A_NODE) -> Case:
    """A case with these jobs, their arrivals stretched to this load."""
    span_s = sum(run_s * wanted for _, run_s, wanted, _, _ in drawn) / (nodes * gpus * load)
    first, last = min(drawn)[0], max(drawn)[0]
    jobs: list[TraceJob] = []
    for at, run_s, wanted, user, account in sorted(drawn):
        jobs.append(made(len(jobs), (at - first) / (last - first) * span_s, run_s, wanted, user, account))
    shape = f"{nodes}x{gpus}"
    return Case(f"{name} @{shape} load {load:g}", tuple(jobs), nodes_of(shape), name, grain_s)


def _lognormal(dice: Random, median_s: float, sigma: float, most_s: float) -> float:
    return min(most_s, max(1.0, exp(dice.gauss(log(median_s), sigma))))


# --- floods ---------------------------------------------------------------------------------------

_FLOODS = (
    # nodes, load, narrow jobs, median s, sigma, part of the GPU time that is wide, wide median h, one user, bursts
    (2, 2.0, 5000, 600.0, 1.5, 0.30, 0.5, True, 0),
    (2, 3.0, 5000, 300.0, 1.0, 0.20, 0.2, True, 0),
    (4, 1.5, 4000, 900.0, 1.2, 0.40, 0.5, False, 8),
    (3, 1.1, 4000, 600.0, 1.5, 0.25, 0.3, True, 6),
    (3, 2.5, 4000, 1200.0, 1.5, 0.50, 1.0, True, 0),
    (4, 1.3, 5000, 450.0, 1.2, 0.15, 0.2, False, 0),
    (2, 1.1, 4000, 600.0, 1.0, 0.30, 0.5, False, 0),
    (2, 1.5, 6000, 300.0, 1.8, 0.10, 0.1, True, 3),
)


def _floods() -> Iterator[Case]:
    for number, (nodes, load, count, median_s, sigma, wide_part, wide_h, is_alone, bursts) in enumerate(_FLOODS):
        name = f"flood {number + 1}"
        dice = Random(name)
        drawn: list[Drawn] = []
        for _ in range(count):
            at = dice.random() if not bursts else (dice.randrange(bursts) + 0.02 * dice.random()) / bursts
            drawn.append((at, _lognormal(dice, median_s, sigma, 2 * DAY_S), 1, "flooder", ""))
        wide_left = sum(run_s for _, run_s, *_ in drawn) * wide_part / (1 - wide_part)
        while wide_left > 0:
            run_s = _lognormal(dice, wide_h * HOUR_S, 1.0, 2 * DAY_S)
            gpus = nodes * GPUS_A_NODE
            drawn.append((dice.random(), run_s, gpus, "flooder" if is_alone else "other", ""))
            wide_left -= run_s * gpus
        yield _case(name, drawn, nodes, load, USUAL_GRAIN_S)


# --- seconds and minutes --------------------------------------------------------------------------

_SECONDS = (
    # nodes, GPUs a node, load, jobs, median s, sigma, part of the jobs that is wide, users
    (1, 4, 0.9, 2500, 4.0, 1.0, 0.02, 1),
    (1, 8, 1.5, 3000, 6.0, 1.2, 0.03, 3),
    (2, 8, 1.1, 3000, 10.0, 1.0, 0.02, 2),
    (1, 4, 2.0, 2500, 2.0, 0.5, 0.02, 1),
    (2, 8, 0.8, 3000, 20.0, 1.3, 0.05, 1),
    (1, 8, 1.1, 2500, 5.0, 1.0, 0.02, 1),
)


def _seconds() -> Iterator[Case]:
    for number, (nodes, gpus, load, count, median_s, sigma, wide, users) in enumerate(_SECONDS):
        name = f"seconds {number + 1}"
        dice = Random(name)
        drawn = []
        for _ in range(count):
            wanted = nodes * gpus if dice.random() < wide else dice.choice((1, 1, 1, 2))
            run_s = _lognormal(dice, median_s, sigma, 600.0)
            drawn.append((dice.random(), run_s, wanted, f"user{dice.randrange(users)}", ""))
        yield _case(name, drawn, nodes, load, SECONDS_GRAIN_S, gpus)


_MINUTES = (
    # nodes, load, jobs, median s, sigma, weights of 1, 2, 4, 8 GPUs and of all nodes
    (2, 0.9, 4000, 120.0, 1.2, (60, 15, 10, 10, 5)),
    (4, 1.2, 4000, 240.0, 1.5, (70, 10, 10, 8, 2)),
    (3, 1.6, 4000, 180.0, 1.2, (80, 5, 5, 5, 5)),
    (4, 0.8, 4000, 300.0, 1.8, (50, 15, 15, 15, 5)),
    (2, 1.3, 4000, 90.0, 1.5, (75, 10, 5, 5, 5)),
    (3, 1.0, 4000, 600.0, 1.0, (60, 20, 10, 7, 3)),
)


def _minutes() -> Iterator[Case]:
    for number, (nodes, load, count, median_s, sigma, weights) in enumerate(_MINUTES):
        name = f"minutes {number + 1}"
        dice = Random(name)
        widths, drawn = (1, 2, 4, 8, nodes * GPUS_A_NODE), []
        lengths = [_lognormal(dice, median_s, 0.7, DAY_S) for _ in range(12)]
        for _ in range(count):
            user = min(11, int(dice.expovariate(0.4)))
            at = dice.randrange(5) + dice.gauss(14.5, 4.0) % 24 / 24
            run_s = _lognormal(dice, lengths[user], sigma, DAY_S)
            drawn.append((at, run_s, dice.choices(widths, weights)[0], f"user{user:02}", ""))
        yield _case(name, drawn, nodes, load, MINUTES_GRAIN_S)


# --- two groups -----------------------------------------------------------------------------------

_GROUPS = (
    # nodes, load, part of the GPU time that is the wide group's, narrow median s, wide median h
    (2, 1.2, 0.5, 1200.0, 2.0),
    (4, 1.5, 0.6, 900.0, 1.0),
    (3, 0.9, 0.4, 1800.0, 1.0),
    (2, 1.8, 0.6, 600.0, 0.5),
    (4, 1.0, 0.3, 1200.0, 0.5),
    (3, 1.4, 0.5, 2400.0, 1.5),
)


def _groups() -> Iterator[Case]:
    for number, (nodes, load, wide_part, median_s, wide_h) in enumerate(_GROUPS):
        name = f"two groups {number + 1}"
        dice = Random(name)
        drawn = []
        for _ in range(3000):
            run_s = _lognormal(dice, median_s, 1.2, DAY_S)
            drawn.append((dice.random(), run_s, 1, f"narrow{dice.randrange(4)}", "narrow"))
        left = sum(run_s for _, run_s, *_ in drawn) * wide_part / (1 - wide_part)
        while left > 0:
            gpus = dice.choice((4, 8, 8, nodes * GPUS_A_NODE))
            run_s = _lognormal(dice, wide_h * HOUR_S, 1.0, 2 * DAY_S)
            drawn.append((dice.random(), run_s, gpus, f"wide{dice.randrange(2)}", "wide"))
            left -= run_s * gpus
        yield _case(name, drawn, nodes, load, USUAL_GRAIN_S)


# --- Lublin and Feitelson -------------------------------------------------------------------------

_LUBLIN = ((2, 0.9, 1), (4, 1.5, 6), (3, 1.2, 4), (8, 0.8, 8), (4, 1.1, 1), (2, 2.0, 4), (8, 1.2, 10), (3, 0.9, 2))
"""Nodes, load, users."""

_SERIAL, _POWER_OF_2, _LEAST_LOG, _LOWER_PART = 0.2927, 0.6686, 1.2, 0.875
_SHORT, _LONG, _SHORT_PART_A_NODE, _SHORT_PART = (6.57, 0.823), (639.1, 0.0156), -0.003, 0.6986
_ARRIVAL = 6.0415, 0.8531
"""Of their batch jobs: shape and scale of the logarithms' gamma distributions."""


def _lublin() -> Iterator[Case]:
    for number, (nodes, load, users) in enumerate(_LUBLIN):
        name = f"lublin {number + 1}"
        dice = Random(name)
        most_log = log2(nodes * GPUS_A_NODE)
        middle_log = max(_LEAST_LOG, most_log - 2.5)
        at, drawn = 0.0, []
        for _ in range(3000):
            gpus = 1
            if dice.random() >= _SERIAL:
                is_lower = dice.random() < _LOWER_PART
                log_gpus = dice.uniform(*((_LEAST_LOG, middle_log) if is_lower else (middle_log, most_log)))
                gpus = round(2 ** (round(log_gpus) if dice.random() < _POWER_OF_2 else log_gpus))
            gpus = min(gpus, nodes * GPUS_A_NODE)
            is_short = dice.random() < _SHORT_PART + _SHORT_PART_A_NODE * gpus
            run_s = min(2.0 * DAY_S, exp(dice.gammavariate(*(_SHORT if is_short else _LONG))))
            at += min(DAY_S / 4, exp(dice.gammavariate(*_ARRIVAL)))
            drawn.append((at, run_s, gpus, f"user{dice.randrange(users)}", ""))
        yield _case(name, drawn, nodes, load, USUAL_GRAIN_S)


_FAMILIES: tuple[Callable[[], Iterator[Case]], ...] = (_floods, _seconds, _minutes, _groups, _lublin)


def generated() -> list[Case]:
    """All of them."""
    return [case for family in _FAMILIES for case in family()]
