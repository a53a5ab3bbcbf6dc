"""Engines on a bench: what a run is to do is said once, for real processes and for simulated ones."""

from __future__ import annotations

import os
import pwd
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fake_systemd import FakeSystemd

from gpusched.addons.simulate.engine import SimulatedEngine, SimulatedOutcome
from gpusched.engine.cluster import ClusterEngine
from gpusched.engine.launchers import UnitNames
from gpusched.engine.linux import proctree
from gpusched.engine.local import LocalEngine
from gpusched.engine.systemd import UnitLauncher
from gpusched.model.execution import (
    EngineEvent,
    LimitOrder,
    OpenRun,
    RunEnded,
    RunLost,
    RunNeverStarted,
    RunStarted,
    StopOrder,
    SuspendOrder,
    Ticket,
)
from gpusched.model.job import Launch
from gpusched.model.launch import SUPERVISED
from gpusched.ports import Engine

ENDS = (RunEnded, RunLost, RunNeverStarted)
BOOT = "boot-1"
FOREVER = float("inf")
E = TypeVar("E")


@dataclass(frozen=True)
class Does:
    """What a run does."""

    lasts_s: float = 0.0
    exit_code: int = 0
    signal: int | None = None
    ignores_stop: bool = False
    stop_code: int | None = None
    """It handles its stop signal, and then ends with this exit code."""
    says_done: bool = False
    leaves_one_behind: bool = False
    missing_command: bool = False


def to_start(tickets: Iterable[Ticket]) -> list[OpenRun]:
    """Runs that are to start, as the daemon wants them."""
    return [
        OpenRun(
            ticket.run, BOOT, None, None, adopted=ticket.adopt, limit=LimitOrder(ticket.time_limit_s), ticket=ticket
        )
        for ticket in tickets
    ]


class WallClock:
    """The real one."""

    def now(self) -> float:
        """UTC epoch seconds."""
        return time.time()


class ManualClock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.at = 1_000_000.0

    def now(self) -> float:
        """UTC epoch seconds."""
        return self.at


class Bench:
    """An engine and everything it said so far, over all its restarts."""

    engine: Engine

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: list[EngineEvent] = []
        self.done: dict[str, Does] = {}

    def ticket(self, run: str, does: Does | None = None, **changes: Any) -> Ticket:
        """A ticket with harmless settings; graces are short."""
        does = does or Does()
        self.done[run] = does
        fields: dict[str, Any] = {
            "run": run,
            "uid": os.getuid(),
            "user": pwd.getpwuid(os.getuid()).pw_name,
            "argv": ("sh", "-c", shell_text(does)) if not does.missing_command else ("no-such-command",),
            "script": None,
            "env": {"PATH": "/usr/local/bin:/usr/bin:/bin"},
            "work_dir": str(self.folder),
            "umask": 0o022,
            "stdout_path": f"{run}.out",
            "stderr_path": None,
            "append": False,
            "time_limit_s": None,
            "grace_s": 20.0,
            "leftover_grace_s": 0.2,
            "stop_signal": int(signal.SIGTERM),
        }
        fields |= changes
        launch = {name: fields.pop(name) for name in SUPERVISED if name in fields}
        return Ticket(**fields, launch=Launch(**launch, script_sha=None, script_name=None, env_sha=""))

    def start(self, run: str, does: Does | None = None, **changes: Any) -> Ticket:
        """Start one run."""
        ticket = self.ticket(run, does, **changes)
        self.engine.reconcile(to_start([ticket]))
        return ticket

    def of(self, run: str) -> list[EngineEvent]:
        """All that was said of a run."""
        return [event for event in self.seen if event.run == run]

    def until(self, run: str, *kinds: type[E], timeout_s: float = 60.0) -> E:
        """Wait for the first event of this kind about this run."""

        def found() -> list[E]:
            return [event for event in self.of(run) if isinstance(event, kinds)]

        what = f"{[kind.__name__ for kind in kinds]} of run {run}"
        try:
            self.wait(found, timeout_s, what)
        except AssertionError as error:
            raise AssertionError(f"{error}, in {self.of(run)}") from None
        return found()[0]

    def end_of(self, run: str) -> RunEnded:
        """Wait for the run's end, which must be an ordinary one."""
        end = self.until(run, *ENDS)
        assert isinstance(end, RunEnded), end
        return end

    def ready(self, run: str) -> RunStarted:
        """Wait until it runs, and its shell has set its traps."""
        return self.until(run, RunStarted)

    def wait(self, predicate: Callable[[], object], timeout_s: float = 60.0, what: str = "it") -> None:
        """Collect events until it holds."""
        raise NotImplementedError

    def let_pass(self, seconds: float) -> None:
        """Time goes by; events are collected."""
        raise NotImplementedError

    def save(self, run: str, at: float) -> None:
        """The run says that it has saved its work at this instant."""
        raise NotImplementedError

    def burn(self, run: str, cpu_s: float) -> None:
        """The run, which does nothing else, has used so much CPU time; a real one does so by itself."""

    def restart(self) -> None:
        """What a new daemon has: an engine that knows only what outlived the old one."""
        raise NotImplementedError

    def close(self) -> None:
        """End everything."""
        raise NotImplementedError


class LocalBench(Bench):
    """Real processes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.spool = folder / "spool"
        self.engine: LocalEngine = self.make()

    def make(self) -> LocalEngine:
        """A daemon's engine on the bench's spool."""
        return LocalEngine(self.spool, boot_id=BOOT, clock=WallClock())

    def wait(self, predicate: Callable[[], object], timeout_s: float = 60.0, what: str = "it") -> None:
        deadline = time.monotonic() + timeout_s
        self.seen += self.engine.events()
        while not predicate():
            assert time.monotonic() < deadline, f"after {timeout_s:g} s still not: {what}"
            self.engine.wait(0.01)
            self.seen += self.engine.events()

    def let_pass(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() >= until)

    def ready(self, run: str) -> RunStarted:
        started = super().ready(run)
        self.wait(lambda: "ready" in self.output(run), what=f"a word from run {run}")
        return started

    def output(self, run: str) -> str:
        """What it wrote so far."""
        path = self.folder / f"{run}.out"
        return path.read_text() if path.exists() else ""

    def save(self, run: str, at: float) -> None:
        (process,) = (p for p in self.processes() if p.pid == self.until(run, RunStarted).pid)
        variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        (path,) = (v.partition(b"=")[2] for v in variables if v.startswith(b"GPUSCHED_CHECKPOINT_FILE="))
        Path(os.fsdecode(path)).touch()
        os.utime(path, (at, at))

    def restart(self) -> None:
        self.engine.close()
        self.engine = self.make()

    def processes(self) -> list[proctree.Process]:
        """Live processes that carry the mark of this bench's spool."""
        mark = f"GPUSCHED_SPOOL={self.spool}".encode()
        found = []
        for pid in proctree.all_pids():
            try:
                marked = mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            process = proctree.read_process(pid)
            if marked and process is not None and process.is_alive:
                found.append(process)
        return found

    def close(self) -> None:
        self.seen += self.engine.events()
        ended = {event.run for event in self.seen if isinstance(event, ENDS)}
        mine = [run for run in self.done if run not in ended]
        for run in mine:
            self.engine.order(run, StopOrder("cancel", grace_s=0))
        known = {event.run for event in self.seen}
        for run in mine:
            if run in known:
                self.until(run, *ENDS)
        self.engine.close()
        for process in self.processes():
            proctree.send(process, signal.SIGKILL)


class ClusterBench(LocalBench):
    """Real processes of one of two nodes."""

    def make(self) -> Any:
        self.local = super().make()
        self.idle = LocalEngine(self.folder / "spool of n2", boot_id="boot of n2", clock=WallClock())
        return ClusterEngine({"n1": self.local, "n2": self.idle}, "n1")

    def wait(self, predicate: Callable[[], object], timeout_s: float = 60.0, what: str = "it") -> None:
        deadline = time.monotonic() + timeout_s
        self.seen += self.engine.events()
        while not predicate():
            assert time.monotonic() < deadline, f"after {timeout_s:g} s still not: {what}"
            self.local.wait(0.01)
            self.seen += self.engine.events()


class UnitBench(LocalBench):
    """Real processes, each run in a unit of systemd."""

    made = 0

    def __init__(self, folder: Path) -> None:
        # A unit of the bench before may still be on its way out.
        UnitBench.made += 1
        self.names = UnitNames(f"gpusched-bench{os.getpid()}x{UnitBench.made}", "gpusched-bench.slice")
        super().__init__(folder)

    def make(self) -> LocalEngine:
        return LocalEngine(
            self.spool, boot_id=BOOT, clock=WallClock(), launcher=partial(UnitLauncher, names=self.names)
        )

    def wait(self, predicate: Callable[[], object], timeout_s: float = 60.0, what: str = "it") -> None:
        # Where there is a systemd to try things with, it is often an emulated machine.
        super().wait(predicate, 4 * timeout_s, what)

    @staticmethod
    def missing() -> str | None:
        """Why there can be none here."""
        if os.geteuid() != 0:
            return "only root may have units started"
        return None if os.path.isdir("/run/systemd/system") else "PID 1 is not systemd"


class StandInBench(LocalBench):
    """Real processes, each started by a stand-in for systemd."""

    def __init__(self, folder: Path) -> None:
        self.systemd = FakeSystemd(folder / "bus")
        super().__init__(folder)

    def make(self) -> LocalEngine:
        launcher = partial(UnitLauncher, names=UnitNames(), bus=str(self.systemd.path))
        return LocalEngine(self.spool, boot_id=BOOT, clock=WallClock(), launcher=launcher)

    def close(self) -> None:
        super().close()
        self.systemd.close()


class SimulatedBench(Bench):
    """No processes, and time that is moved."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.clock = ManualClock()
        self.engine: SimulatedEngine = SimulatedEngine(self.clock, self.outcome, BOOT)

    def wait(self, predicate: Callable[[], object], timeout_s: float = 60.0, what: str = "it") -> None:
        self.seen += self.engine.events()
        while not predicate():
            at = self.engine.next_event_at()
            assert at is not None, f"nothing happens any more, but still not: {what}"
            self.clock.at = max(self.clock.at, at)
            self.seen += self.engine.events()

    def outcome(self, ticket: Ticket) -> SimulatedOutcome:
        """What this run was made to do."""
        return outcome(self.done[ticket.run])

    def let_pass(self, seconds: float) -> None:
        self.clock.at += seconds
        self.seen += self.engine.events()

    def save(self, run: str, at: float) -> None:
        self.engine.saved_at[run] = at

    def burn(self, run: str, cpu_s: float) -> None:
        self.engine.cpu_s_of[run] = cpu_s

    def restart(self) -> None:
        self.engine.set_waker(None)

    def close(self) -> None:
        self.engine.close()


def shell_text(does: Does) -> str:
    """The same as a shell command."""
    done = 'echo done > "$GPUSCHED_CHECKPOINT_FILE"' if does.says_done else ":"
    words = ["trap '' TERM" if does.ignores_stop else "", "echo ready"]
    if does.stop_code is not None:
        words.insert(0, f"trap '{done}; exit {does.stop_code}' TERM")
    if does.leaves_one_behind:
        words.append("sleep 600 &")
    if does.lasts_s == FOREVER:
        is_shell = does.ignores_stop or does.stop_code is not None
        words.append("while :; do sleep 0.05; done" if is_shell else "exec sleep 600")
    elif does.lasts_s:
        words.append(f"sleep {does.lasts_s}")
    words.append(f"kill -{does.signal} $$" if does.signal else f"exit {does.exit_code}")
    return "\n".join(word for word in words if word)


def outcome(does: Does) -> SimulatedOutcome:
    """The same as a simulated outcome."""
    return SimulatedOutcome(
        runs_s=does.lasts_s,
        exit_code=does.exit_code,
        signal=does.signal,
        stop_takes_s=FOREVER if does.ignores_stop else 0.0,
        stop_code=does.stop_code,
        says_done=does.says_done,
        leftovers=("sleep(7)",) if does.leaves_one_behind else (),
        launch_error="cannot run no-such-command" if does.missing_command else None,
    )


def open_run(
    run: str,
    started: RunStarted | None = None,
    *,
    boot: str = BOOT,
    order: StopOrder | SuspendOrder | None = None,
) -> OpenRun:
    """What the store would know of a run."""
    return OpenRun(
        run,
        boot,
        started.supervisor_pid if started else None,
        started.supervisor_start_ticks if started else None,
        order,
    )
