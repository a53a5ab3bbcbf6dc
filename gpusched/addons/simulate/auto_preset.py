"""`preset = "auto"`: replay the last weeks under every preset each night, and choose a preset.

    export     in small steps between ticks: the jobs of the last weeks, without any text written by users
    replay     in a separate process (`simulate.preset_trial`) that has access to the export only; the system
               daemon runs it as nobody
    decide     by `preset_choice`; saved in a file of the daemon, so that a restart changes nothing

If the process dies, takes too long or answers nonsense, the preset in force stays; the next night tries again.
"""

from __future__ import annotations

import json
import os
import pwd
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from logging import getLogger
from typing import IO, Any

import gpusched
from gpusched import paths
from gpusched.addons.simulate.preset_choice import (
    Judgement,
    PresetState,
    TrialResult,
    decide,
    too_little,
    with_fewer_jobs,
    with_problem,
    with_too_little,
)
from gpusched.addons.simulate.trial_export import (
    EndedJob,
    ReplayRequest,
    TrialLimits,
    at_rest,
    without_paths,
    without_texts,
)
from gpusched.daemon.preset import sentence
from gpusched.daemon.tick import Ticker
from gpusched.errors import GpuschedError, Refused
from gpusched.model import value
from gpusched.model.planner_settings import AUTO
from gpusched.model.presets import CHOICES
from gpusched.model.value import asdict, replace
from gpusched.predict.family import family

log = getLogger("gpusched.daemon")

HOUR = 3
"""Local hour at which the machine is assumed to be quiet."""
WINDOW_S = 28 * 86400.0
MOST_EXPORTED = 20_000
"""Most jobs in an export; with more, the window is halved."""
CPU_S = 1800
MEMORY_MIB = 1024
WALL_S = 3 * 3600.0
"""Wall time limit of one replay."""

_CHUNK = 64
_LARGEST_ANSWER = 1 << 20
_BOOT = (
    "import json, os, sys; os.nice(19); sys.path[:] = json.loads(sys.argv[1]); "
    "from gpusched.addons.simulate.preset_trial import main; main(sys.argv[2])"
)
_NOBODY = 65534

Start = Callable[[int, TrialLimits], subprocess.Popen[bytes]]
"""Starts the process on an export, passed as a file descriptor."""


def read_state(path: str) -> PresetState:
    """The last decision; an empty state when the file is missing or unreadable."""
    try:
        with open(path, "rb") as file:
            state = value.decode(file.read(_LARGEST_ANSWER), PresetState)
    except (OSError, ValueError):
        return PresetState()
    return state if state.in_force in CHOICES else PresetState()


def night_after(at: float) -> float:
    """Start of the next quiet period, in UTC epoch seconds."""
    day = time.localtime(at)
    for later in (0, 1):
        found = time.mktime((day.tm_year, day.tm_mon, day.tm_mday + later, HOUR, 0, 0, 0, 0, -1))
        if found > at:
            break
    return found


class AutoPreset:
    """Evaluates the presets and puts the chosen one in force.

    Args:
        path: file of the last decision; None to keep it in memory only.
        on_choice: called with a newly chosen preset, before the settings change.
    """

    def __init__(
        self,
        ticker: Ticker,
        path: str | None,
        on_choice: Callable[[str], None] = lambda name: None,
        *,
        start: Start | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = PresetState() if path is None else read_state(path)
        self._ticker, self._scheduler = ticker, ticker.scheduler
        self._path = path
        self._on_choice = on_choice
        self._start = start or start_trial
        self._monotonic = monotonic
        self._is_asked = False
        """An admin has requested an evaluation now."""
        self._export: Generator[None, None, bool] | None = None
        self._file: IO[bytes] | None = None
        self._exported = (0, 0.0, 0.0)
        """Number of jobs, and the end times of the first and the last."""
        self._child: subprocess.Popen[bytes] | None = None
        self._deadline = 0.0
        self._ending: list[subprocess.Popen[bytes]] = []
        """Killed and not reaped yet."""
        self._answer = b""
        self._judged = ""
        """The preset that the current evaluation compares the others with."""

    # --- what others see ------------------------------------------------------------------------

    @property
    def is_auto(self) -> bool:
        """Whether the settings say `auto`."""
        return self._scheduler.settings.priority.preset == AUTO

    @property
    def in_force(self) -> str:
        return self.state.in_force if self.is_auto else self._scheduler.settings.priority.preset

    @property
    def is_judging(self) -> bool:
        return self._is_asked or self._export is not None or self._child is not None

    @property
    def pid(self) -> int | None:
        """Process id of the running replay."""
        return None if self._child is None else self._child.pid

    def next_at(self) -> float | None:
        """Instant of the next evaluation; None when there is none."""
        if not self.is_auto:
            return None
        now = self._scheduler.now()
        return now if self.is_judging else max(now, self._due_at(now))

    def document(self) -> dict[str, Any]:
        """For clients: the preset in force, and why."""
        state, judgement = self.state, self.state.judgement
        return {
            "setting": self._scheduler.settings.priority.preset,
            "in_force": self.in_force,
            "since_at": state.since_at if self.is_auto else None,
            "why": state.why if self.is_auto else "the settings say so",
            "problem": state.problem,
            "judged_at": None if judgement is None else judgement.at,
            "next_at": self.next_at(),
            "is_judging": self.is_judging,
        }

    def table(self) -> dict[str, Any]:
        """For clients: the results of the last evaluation for each preset."""
        judgement = self.state.judgement
        presets = []
        for name in CHOICES:
            worth = None if judgement is None else judgement.worth.get(name)
            gain = None if judgement is None else judgement.gains.get(name)
            presets.append(
                {
                    "preset": name,
                    "in_force": name == self.in_force,
                    "worth": None if worth is None else asdict(worth),
                    "gain": None if gain is None else asdict(gain),
                    "excluded": None if judgement is None else self.state.excluded.get(name),
                }
            )
        return {
            **self.document(),
            "jobs": None if judgement is None else judgement.jobs,
            "jobs_since_at": None if judgement is None else judgement.since_at,
            "compared_with": None if judgement is None else judgement.in_force,
            "presets": presets,
        }

    def judge_now(self) -> None:
        """Evaluate the presets now. Raises: Refused while an evaluation is under way."""
        if self.is_judging:
            raise Refused("the presets are being evaluated", "see the result with: gctl preset")
        self._check_nodes()
        self._is_asked = True

    def _check_nodes(self) -> None:
        """Raise Refused where the daemon cannot be replayed: with several nodes."""
        nodes = len(self._scheduler.nodes(self._scheduler.now()))
        if nodes > 1:
            text = f"presets are compared for a single node, and this cluster has {nodes}"
            raise Refused(text, "name one under [priority] preset")

    # --- what the loop calls --------------------------------------------------------------------

    def poll(self) -> bool:
        """Do a small part of what is due; return whether to call again soon."""
        self._ending = [one for one in self._ending if one.poll() is None]
        if self._child is not None:
            if not self.is_auto and not self._is_asked:
                self._end("the settings no longer leave the choice to it")
                return False
            self._follow(self._child)
            return False
        if self._export is None and not self._is_due():
            return False
        if not self._ticker.is_quiet:
            return self._export is not None
        try:
            self._go_on()
        except (OSError, GpuschedError, subprocess.SubprocessError) as error:
            self._end(f"the history could not be exported: {getattr(error, 'message', error)}")
        return self._export is not None

    def close(self) -> None:
        """Abort the current evaluation; the next daemon starts over."""
        self._let_go()

    # --- the steps ------------------------------------------------------------------------------

    def _is_due(self) -> bool:
        now = self._scheduler.now()
        if self._is_asked:
            return True
        if not self.is_auto:
            return False
        if self.state.tried_at is None:
            self._keep(replace(self.state, tried_at=now))
        return now >= self._due_at(now)

    def _due_at(self, now: float) -> float:
        tried_at = now if self.state.tried_at is None else self.state.tried_at
        # A clock that was set back must not put it off for long.
        return night_after(min(tried_at, now))

    def _go_on(self) -> None:
        if self._export is None:
            self._keep(replace(self.state, tried_at=self._scheduler.now()))
            self._judged = self.in_force
            self._export = self._steps()
        try:
            next(self._export)
        except StopIteration as stop:
            self._export = None
            if stop.value:
                self._replay()

    def _steps(self) -> Generator[None, None, bool]:
        """Write the export in small steps; return whether there is enough to replay."""
        now, window_s = self._scheduler.now(), WINDOW_S
        self._check_nodes()
        while not (yield from self._write(now, now - window_s)):
            window_s /= 2
        count, first_at, last_at = self._exported
        why = too_little(count, last_at - first_at)
        if why is None:
            return True
        self._let_go()
        if self.is_auto:
            self._keep(with_too_little(self.state, why))
        else:
            self._keep(with_problem(self.state, why))
        self._say()
        return False

    def _write(self, now: float, since_at: float) -> Generator[None, None, bool]:
        """Write the jobs that have ended since; return whether they were few enough."""
        scheduler = self._scheduler
        store = scheduler.store
        if self._file is not None:
            self._file.close()
        self._file = file = tempfile.TemporaryFile(dir=os.path.dirname(self._path or "") or None)  # noqa: SIM115  it outlives this
        (node,) = scheduler.nodes(now)
        request = ReplayRequest(at_rest(node), scheduler.settings, self._judged, self.state.most_jobs)
        file.write(value.encode(request) + b"\n")
        after, count, first_at = (since_at, 0), 0, 0.0
        while jobs := store.ended_jobs(now, after, _CHUNK):
            after = (jobs[-1].end_at or 0.0, jobs[-1].id)
            ended = [job for job in jobs if job.run and not job.is_array]
            runs: dict[int, list[Any]] = {}
            for run in store.runs([job.id for job in ended]):
                runs.setdefault(run.job_id, []).append(without_paths(run))
            for job in ended:
                events = store.events(job.id) if job.spec.hold else ()
                released = tuple(replace(one, text="") for one in events if one.kind == "released")
                line = EndedJob(without_texts(job, family(job).command), tuple(runs.get(job.id, ())), released)
                file.write(value.encode(line) + b"\n")
            if ended and not count:
                first_at = ended[0].end_at or 0.0
            count += len(ended)
            self._exported = count, first_at, after[0]
            if count > MOST_EXPORTED:
                return False
            yield
        if not count:
            self._exported = 0, 0.0, 0.0
        return True

    def _replay(self) -> None:
        file = self._file
        assert file is not None  # it has been written
        file.flush()
        # Reopen it read-only: the process can read the export and nothing else.
        fd = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._child = self._start(fd, TrialLimits(os.getpid(), CPU_S, MEMORY_MIB))
        except (OSError, subprocess.SubprocessError) as error:
            why = getattr(error, "strerror", None) or str(error)
            self._end(f"the process that replays the last weeks cannot be started: {why.lower()}{_whose_rights()}")
            return
        finally:
            os.close(fd)
            file.close()
            self._file = None
        self._answer, self._deadline = b"", self._monotonic() + WALL_S
        log.info("preset: replaying the jobs of the last weeks (%d) under every preset", self._exported[0])

    def _follow(self, child: subprocess.Popen[bytes]) -> None:
        has_ended = child.poll() is not None
        self._collect(child)
        if len(self._answer) > _LARGEST_ANSWER:
            self._end("the process that replays the last weeks wrote invalid output")
        elif has_ended:
            self._conclude(child.returncode)
        elif self._monotonic() > self._deadline:
            self._end(f"replaying the last weeks took longer than {WALL_S / 3600:.0f} hours", with_fewer_jobs)

    def _collect(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        fd = child.stdout.fileno()
        while len(self._answer) <= _LARGEST_ANSWER and select.select([fd], [], [], 0)[0]:
            data = os.read(fd, 1 << 16)
            if not data:
                break
            self._answer += data

    def _conclude(self, code: int) -> None:
        answer, judged = self._answer, self._judged
        if code:
            text = "the process that replays the last weeks has ended early"
            if code < 0:
                # Most likely a resource limit.
                self._end(f"{text} (signal {-code})", with_fewer_jobs)
            else:
                self._end(f"{text} (exit code {code}){_whose_rights()}")
            return
        try:
            result = value.decode(answer, TrialResult)
        except (ValueError, RecursionError):
            result = None
        if result is not None and result.error is not None:
            took_too_much = with_fewer_jobs if result.is_too_much else with_problem
            self._end(f"the last weeks could not be replayed: {result.error}", took_too_much)
            return
        if result is None or not result.makes_sense(judged):
            self._end("the process that replays the last weeks wrote invalid output")
            return
        self._let_go()
        now = self._scheduler.now()
        judgement = Judgement(now, result.jobs, self._exported[1], judged, result.worth, result.gains)
        if not self.is_auto or judged != self.state.in_force:
            # Keep the result for display; the preset in force stays.
            self._keep(replace(self.state, judgement=judgement, problem=None))
        else:
            before = self.state.in_force
            self._keep(decide(self.state, judgement))
            if self.state.in_force != before:
                self._on_choice(self.state.in_force)
                self._ticker.use_preset(self.state.in_force)
        self._say()

    def _end(self, why: str, becomes: Callable[[PresetState, str], PresetState] = with_problem) -> None:
        self._let_go()
        self._keep(becomes(self.state, why))
        log.warning("preset: %s; %s stays in force", why, self.in_force)

    def _let_go(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            if child.stdout is not None:
                child.stdout.close()
            self._ending.append(child)
        if self._file is not None:
            self._file.close()
            self._file = None
        self._export, self._is_asked, self._answer = None, False, b""

    def _keep(self, state: PresetState) -> None:
        """Take over and save this state. If the file cannot be written, the state lasts until a restart."""
        self.state = state
        if self._path is None:
            return
        try:
            # `gpusched config show` shows all users what is in force.
            paths.replace_file(self._path, value.encode(state), 0o644)
        except OSError as error:
            log.warning("preset: cannot save the decision in %s: %s", self._path, error.strerror)

    def _say(self) -> None:
        log.info("preset: %s", sentence(self.document()))


def start_trial(fd: int, limits: TrialLimits) -> subprocess.Popen[bytes]:
    """Start the replay on an export that only it can read; the system daemon runs it as nobody."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(gpusched.__file__)))
    path = [entry for entry in sys.path if entry]
    if root not in path:
        path.append(root)
    environment = {name: os.environ[name] for name in ("LANG", "LC_ALL", "TZ") if name in os.environ}
    return subprocess.Popen(
        # -S: the path is handed over complete, so the search for site packages can be saved.
        [sys.executable, "-S", "-c", _BOOT, json.dumps(path), value.encode(limits).decode()],
        stdin=fd,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        cwd="/",
        env={**environment, "PATH": os.defpath, "PYTHONDONTWRITEBYTECODE": "1"},
        start_new_session=True,
        **_least_privilege(),
    )


def _whose_rights() -> str:
    return f"; it runs as nobody, who must be able to run {sys.executable}" if paths.is_system() else ""


def _least_privilege() -> dict[str, Any]:
    if not paths.is_system():
        return {}
    uid = gid = _NOBODY
    with suppress(KeyError):
        found = pwd.getpwnam("nobody")
        uid, gid = found.pw_uid, found.pw_gid
    return {"user": uid, "group": gid, "extra_groups": []}
