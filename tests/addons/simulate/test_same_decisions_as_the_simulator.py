"""One trace through a real daemon and both simulators: the same jobs start at the same events, on the same GPUs.

The daemon has real processes on simulated GPUs. It is played in lockstep: each job reads from a pipe of its own until
this test lets it end, and nothing happens before what the event before it led to was decided. Which event is next is
told by the clock of the trace, of which the daemon knows nothing; so nothing here hangs on how long anything takes.
Time limits are further apart than the whole trace is long, so that they decide alike by either clock.

When a run ends, a daemon decides twice: its cores are free at once, its cards when a reading has shown them clean, and
until then it plans with cards that are about to come back. The simulators know one instant for both. So the node takes
no new work, by a drain, from before a job ends until its cards are clean.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
from harness import Daemon
from people import ANN, BOB, EVE, NEEDS_ROOT, SystemDaemon
from support import wait_until

import gpusched
from gpusched.addons.simulate import daemon_run, planner_run
from gpusched.addons.simulate.policies import under
from gpusched.addons.simulate.recording import Recording, decode
from gpusched.addons.simulate.replay import plan_of
from gpusched.addons.simulate.trace import TraceJob
from gpusched.model.value import replace

GPUS, CORES = 8, 24
LENGTH_S = 1_000_000
"""No trace here is longer; by so much do any two time limits differ."""

CONFIG = """
[node]
cpus = {cores}
mem_mib = 65536
[priority]
order = "{order}"
backfill_depth = {depth}
weight_fairshare = 0
weight_short = 0
weight_whole = 0
predict = false
max_age_s = 315360000
max_wait_s = 315360000
[placement]
strategy = "{strategy}"
"""

Started = list[tuple[str, str, tuple[int, ...]]]
"""Jobs of the trace with node and GPUs, by name."""


@dataclass(frozen=True)
class Decision:
    """What started when one thing had happened."""

    at_s: int
    what: str
    started: Started


def a_trace(seed: int, count: int, users: tuple[str, ...]) -> list[TraceJob]:
    """Jobs of cards, parts of cards and cores, more than there is room for."""
    dice = Random(seed)
    instants = iter(dice.sample(range(1, 150_000), count))
    limits = dice.sample(range(1, 2 * count), count)
    jobs = []
    for number in range(count):
        kind = dice.randrange(8)
        gpus = 0 if kind == 0 else dice.choice([1, 1, 2, 2, 3, 4, 6, 8])
        part = dice.choice([0.25, 0.5]) if kind == 1 else None
        jobs.append(
            TraceJob(
                id=str(number),
                submit_s=next(instants),
                run_s=dice.randint(5_000, 60_000),
                estimate_s=limits[number] * LENGTH_S,
                gpus=gpus if part is None else 1,
                gpu_fraction=part,
                cpus=float(dice.choice([1, 2, 4, 8])),
                mem_mib=dice.choice([0, 1024, 8192]),
                user=dice.choice(users),
            )
        )
    return jobs


class Played:
    """A trace as a daemon plays it."""

    def __init__(self, daemon: Daemon, submit: Callable[[TraceJob, list[str]], str], pipes: Path) -> None:
        self.daemon = daemon
        self._submit = submit
        self._pipes = pipes
        self.ids: dict[str, str] = {}
        """Of the daemon, by those of the trace."""
        self._open: dict[str, int] = {}
        """Pipes that running jobs read from."""

    def recording(self) -> Recording:
        """What the daemon's policy sees."""
        return decode(self.daemon.call("GET", "/v1/snapshot"))

    @property
    def node(self) -> str:
        """Name of the only one."""
        (node,) = self.recording().snapshot.nodes
        return node.name

    def await_gpus(self) -> None:
        """Until every card may be used."""

        def are_free() -> bool:
            gpus = [gpu for node in self.recording().snapshot.nodes for gpu in node.gpus]
            return len(gpus) == GPUS and all(gpu.why_not is None and gpu.why_not_whole is None for gpu in gpus)

        wait_until(are_free, what="the cards to be free")

    def play(self, jobs: list[TraceJob]) -> list[Decision]:
        """Submit and end jobs, one at a time; what each led to."""
        coming = sorted(jobs, key=lambda job: job.submit_s, reverse=True)
        waiting: dict[str, TraceJob] = {}
        ends: dict[str, int] = {}
        decisions = []
        while coming or ends:
            soonest = min(ends, key=ends.__getitem__, default=None)
            if coming and (soonest is None or coming[-1].submit_s <= ends[soonest]):
                job = coming.pop()
                at_s, what = job.submit_s, f"{job.id} comes"
                assert at_s not in ends.values(), "two things happen at one instant of the trace"
                waiting[job.id] = job
                self.begin(job)
            else:
                assert soonest is not None
                at_s, what = ends.pop(soonest), f"{soonest} ends"
                assert at_s not in ends.values(), "two jobs end at one instant of the trace"
                self.end(soonest)
            wait_until(self.has_decided, what="what the daemon's policy would start to start")
            started = self.started_of(waiting)
            for name, *_ in started:
                # Else the process of a job that is decided upon later may be there first.
                wait_until(lambda name=name: self.reads(name), what=f"job {name} to read")
                ends[name] = at_s + waiting.pop(name).run_s
            decisions.append(Decision(at_s, what, started))
        assert not waiting
        return decisions

    def has_decided(self) -> bool:
        """Whether what it decided is all there is to decide, by its own snapshot."""
        recording = self.recording()
        return plan_of(recording, recording.settings).starts == ()

    def begin(self, job: TraceJob) -> None:
        """Submit a job that reads from its pipe until that is closed."""
        pipe = self._pipes / job.id
        os.mkfifo(pipe)
        pipe.chmod(0o666)
        self.ids[job.id] = self._submit(job, ["/bin/cat", str(pipe)])

    def end(self, name: str) -> None:
        """Let a job end, and wait until its cards are known to be free."""
        self.daemon.call("POST", "/v1/drain", {"targets": [self.node]})
        os.close(self._open.pop(name))
        (ended,) = self.daemon.wait(self.ids[name])
        assert ended["state"] == "COMPLETED"
        self.await_gpus()
        self.daemon.call("POST", "/v1/undrain", {"targets": [self.node]})

    def reads(self, name: str) -> bool:
        """Whether the process of a job is there, which then reads until the pipe is closed."""
        try:
            self._open[name] = os.open(self._pipes / name, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return False
        return True

    def started_of(self, waiting: dict[str, TraceJob]) -> Started:
        """Those of the waiting ones that wait no more."""
        rows = {row["id"]: row for row in self.daemon.call("GET", "/v1/jobs")["jobs"]}
        found = []
        for name in sorted(waiting):
            row = rows[self.ids[name]]
            if row["state"] != "PENDING":
                found.append((name, row["node"], tuple(sorted(gpu["index"] for gpu in row["gpus"]))))
        return found

    def in_order_of_start(self) -> list[str]:
        """Names of all jobs as the daemon's history has them."""
        names = {job_id: name for name, job_id in self.ids.items()}
        rows = self.daemon.call("GET", "/v1/history?states=all")["jobs"]
        return [names[row["id"]] for row in sorted(rows, key=lambda row: row["start_at"])]


def simulated(simulator: Any, jobs: list[TraceJob], recording: Recording) -> list[Decision]:
    """The same trace on the machine and by the settings that the daemon has recorded."""
    outcome = simulator.run(jobs, recording.snapshot.nodes, recording.settings, keeps_places=True)
    runs = outcome.runs
    assert runs is not None
    layout = runs.layout
    places: dict[int, Started] = {}
    events: dict[int, str] = {job.submit_s: f"{job.id} comes" for job in jobs}
    for run in range(len(runs)):
        job = jobs[runs.job[run]]
        booking = runs.booking(run)
        cards = tuple(sorted(layout.cards[part.card].view.index for part in booking.parts))
        places.setdefault(runs.begin_s[run], []).append((job.id, layout.nodes[booking.node].name, cards))
        events[runs.end_s[run]] = f"{job.id} ends"
    assert max(events) < LENGTH_S
    return [Decision(at_s, what, sorted(places.get(at_s, []))) for at_s, what in sorted(events.items())]


def check(played: Played, jobs: list[TraceJob]) -> None:
    """Both ways, and that the trace was worth it."""
    played.await_gpus()
    recording = played.recording()
    expected = simulated(planner_run, jobs, recording)
    # With the daemon's own tick on the clock of the trace.
    assert simulated(daemon_run, jobs, recording) == expected
    other = replace(recording, settings=under(recording.settings, "fcfs"))
    assert simulated(planner_run, jobs, other) != expected, "the trace has to tell policies apart"
    found = played.play(jobs)
    assert found == expected
    order = played.in_order_of_start()
    when = {name: number for number, one in enumerate(found) for name, *_ in one.started}
    assert [when[name] for name in order] == sorted(when.values())
    at_once = sum(len(one.started) for one in found if one.what.endswith("comes"))
    assert len(jobs) / 5 < at_once < len(jobs) * 4 / 5, "some have to wait, and some not"
    submitted = [job.id for job in sorted(jobs, key=lambda job: job.submit_s)]
    assert order != submitted, "nobody has passed anybody"


def config_of(order: str, depth: int, strategy: str) -> str:
    return CONFIG.format(cores=CORES, order=order, depth=depth, strategy=strategy)


@pytest.fixture
def pipes() -> Iterator[Path]:
    """A folder that every user may enter."""
    folder = Path(tempfile.mkdtemp(prefix="gpusched-pipes-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("order", "depth", "strategy"),
    [
        ("fifo", 1, "pack"),
        pytest.param("sjf", 1, "first", marks=pytest.mark.nightly),
        pytest.param("saf", 3, "spread", marks=pytest.mark.nightly),
        pytest.param("fifo", 0, "pack", marks=pytest.mark.nightly),
    ],
)
def test_jobs_of_one_user_start_the_same(make_daemon: Any, pipes: Path, order: str, depth: int, strategy: str) -> None:
    daemon = make_daemon(fake_gpus=f"{GPUS}x24GiB", config=config_of(order, depth, strategy))
    with gpusched.Client(daemon.socket) as client:

        def submit(job: TraceJob, command: list[str]) -> str:
            return client.submit(
                command,
                gpus=job.gpus if job.gpu_fraction is None else job.gpu_fraction,
                cpus=job.cpus,
                mem=job.mem_mib,
                time=job.estimate_s,
                output="/dev/null",
            ).id

        check(Played(daemon, submit, pipes), a_trace(1, 40, ("ann",)))


@NEEDS_ROOT
@pytest.mark.parametrize(
    ("order", "depth", "strategy"),
    [("multifactor", 1, "best_fit"), pytest.param("sjf", 40, "pack", marks=pytest.mark.nightly)],
)
def test_jobs_of_several_users_start_the_same(pipes: Path, order: str, depth: int, strategy: str) -> None:
    daemon = SystemDaemon(fake_gpus=f"{GPUS}x24GiB")
    daemon.settings.write_text(config_of(order, depth, strategy))
    daemon.start()
    try:
        people = {user: daemon.person(user) for user in (ANN, BOB, EVE)}

        def submit(job: TraceJob, command: list[str]) -> str:
            return people[job.user].submit(
                *command,
                gpus=job.gpus,
                cpus=job.cpus,
                mem_mib=job.mem_mib,
                time_limit_s=job.estimate_s,
                **({} if job.gpu_fraction is None else {"gpu_fraction": job.gpu_fraction}),
            )

        check(Played(daemon, submit, pipes), a_trace(2, 40, tuple(people)))
    finally:
        daemon.close()
