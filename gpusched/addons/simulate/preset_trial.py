"""The last weeks under every preset: the process that the daemon starts at night for `preset = "auto"`.

It reads an export (`trial_export`) from standard input, writes one document to standard output, and has no access to
the job table or anything else of the daemon's. Before reading it drops all privileges it can do without: it runs at
idle priority for CPU and disk, within limits on CPU time and memory, writes no file, starts no process, and dies with
the daemon.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import ceil

import psutil

from gpusched.addons.simulate import daemon_run
from gpusched.addons.simulate.cluster import largest
from gpusched.addons.simulate.comparison import sign_flip_test
from gpusched.addons.simulate.history import trace_of
from gpusched.addons.simulate.outcome import Outcome, width
from gpusched.addons.simulate.policies import Policy, leave_out, leave_out_what_cannot_fit
from gpusched.addons.simulate.preset_choice import PresetGain, PresetWorth, TrialResult
from gpusched.addons.simulate.trace import Trace, TraceJob
from gpusched.addons.simulate.trial_export import EndedJob, ReplayRequest, TrialLimits
from gpusched.errors import GpuschedError
from gpusched.model import value
from gpusched.model.cluster import NodeView
from gpusched.model.presets import CHOICES, under_preset
from gpusched.ports import Changes
from gpusched.store.sqlite import SqliteStore

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38


def main(limits: str) -> None:
    confine(value.decode(limits, TrialLimits))
    try:
        result = judge(sys.stdin.buffer)
    except GpuschedError as error:
        result = TrialResult(error=error.message)
    except MemoryError:
        result = TrialResult(error="the memory that it may use was not enough", is_too_much=True)
    except (ValueError, OSError) as error:
        result = TrialResult(error=f"the history cannot be read: {error}")
    sys.stdout.buffer.write(value.encode(result))
    sys.stdout.buffer.flush()


def confine(limits: TrialLimits) -> None:
    """Drop everything not needed, irrevocably."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != limits.parent:
        # The daemon died before this process could watch it.
        os._exit(1)
    # The OOM killer's first choice, whatever it inherited from the daemon.
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    memory = limits.memory_mib << 20
    for what, most in (
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        _, hard = resource.getrlimit(what)
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (bound, bound))
    # Containers may refuse one or the other, which only costs speed.
    with suppress(OSError):
        os.nice(19)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with suppress(OSError, psutil.Error):
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)


def judge(lines: Iterable[bytes]) -> TrialResult:
    """Replay an export under each preset. Raises: GpuschedError, ValueError."""
    found = iter(lines)
    request = value.decode(next(found, b""), ReplayRequest)
    nodes = (request.node,)
    trace = read_export(found)
    trace.jobs = sorted(trace.jobs, key=lambda job: job.submit_s)[-request.most_jobs :]
    policies = [Policy(name, under_preset(request.settings, name)) for name in CHOICES]
    gpus, procs = largest(nodes)
    trace.keep_those_that_fit(gpus=gpus, procs=procs)
    leave_out_what_cannot_fit(trace, nodes, policies, is_admitted=True)
    outcomes = _outcomes(trace, nodes, policies)
    worth = {name: worth_of(outcome, request.node) for name, outcome in outcomes.items()}
    before = outcomes[request.in_force] if request.in_force in outcomes else outcomes[CHOICES[0]]
    gains = {}
    for name, outcome in outcomes.items():
        if name != request.in_force:
            made = sign_flip_test(before, outcome, mean_completion_s, comparisons=len(CHOICES) - 1)
            gains[name] = PresetGain(made.parts, made.better, made.worse, made.p)
    return TrialResult(len(trace.jobs), worth, gains)


def _outcomes(trace: Trace, nodes: Sequence[NodeView], policies: Sequence[Policy]) -> dict[str, Outcome]:
    """The schedule of each, of the jobs that start under all of them."""
    while True:
        try:
            return {
                one.name: daemon_run.run(trace.jobs, nodes, one.settings, begins_at=trace.begins_at) for one in policies
            }
        except daemon_run.NeverStarted as error:
            leave_out(trace, error.jobs)


def read_export(lines: Iterable[bytes]) -> Trace:
    """Jobs of an export, as read from the table. Raises: ValueError."""
    store = SqliteStore.in_memory()
    changes = Changes()
    for line in lines:
        one = value.decode(line, EndedJob)
        changes.jobs[one.job.id] = one.job
        changes.runs.update({run.id: run for run in one.runs})
        changes.events += one.events
    store.commit(changes)
    return trace_of(store)


def mean_completion_s(outcome: Outcome) -> float:
    """Mean time from submission to end, in seconds."""
    return _mean(outcome.completion_s)


def worth_of(outcome: Outcome, node: NodeView) -> PresetWorth:
    """Worth of a schedule: see `preset_choice`."""
    wide = max(2, ceil(len(node.gpus) / 2))
    light = _light_users(outcome.jobs)
    return PresetWorth(
        completion_s=mean_completion_s(outcome),
        wait_s=_mean(outcome.wait_s),
        longest_wait_s=float(max(outcome.wait_s)),
        wide_wait_s=_mean_wait(outcome, lambda job: job.gpus >= wide),
        light_wait_s=_mean_wait(outcome, lambda job: job.user in light),
    )


def _light_users(jobs: Sequence[TraceJob]) -> frozenset[str]:
    """Users below an equal share of all GPU time; empty with only one user."""
    used: defaultdict[str, float] = defaultdict(float)
    for job in jobs:
        used[job.user] += job.run_s * (width(job) or job.cpus)
    fair = sum(used.values()) / max(1, len(used))
    return frozenset(user for user, amount in used.items() if amount < fair)


def _mean_wait(outcome: Outcome, is_one: Callable[[TraceJob], bool]) -> float | None:
    waits = [wait_s for job, wait_s in zip(outcome.jobs, outcome.wait_s, strict=True) if is_one(job)]
    return _mean(waits) if waits else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
