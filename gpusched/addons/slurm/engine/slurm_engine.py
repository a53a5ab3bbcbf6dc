"""The engine for runs that the site's Slurm runs: see `ports.Engine`.

Nothing here waits for Slurm on the daemon's own thread. One thread asks squeue about all runs at once, every `poll_s`;
a few others carry out what is due for single runs: sbatch, scancel.

A run is submitted exactly once. The daemon has committed it before the engine hears of it. While sbatch runs, it holds
a lock on the file that its answer goes to, also when the daemon has been killed. A run whose submission may have
happened is doubtful: it is looked for among the user's jobs by its mark, in an answer of squeue that was asked for
after sbatch had ended, before anything else is done with it. Should Slurm have two jobs for a run all the same, the
wrapper lets one of them run.

A job that squeue no longer lists has not ended for that: sacct is asked, then scontrol, then the record that its
wrapper left. Only when all of them are silent for `lost_after_s`, while squeue answers, is the run lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import queue
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from logging import getLogger

from gpusched.addons.slurm.engine.answers import (
    ACCOUNTING_FORMAT,
    QUEUE_FORMAT,
    NativeState,
    RunRecord,
    accepted_id,
    by_mark,
    may_be_accepted_later,
    outcome,
    read_accounting,
    read_job,
    read_queue,
)
from gpusched.addons.slurm.engine.commands import (
    MAKE_FOLDERS,
    REMOVE_RECORDS,
    Account,
    CommandAnswer,
    SlurmCommands,
    why_not,
)
from gpusched.addons.slurm.handover.job_script import RECORD, check_script, job_script, spec_values
from gpusched.addons.slurm.handover.losses import HANDOVER, check_losses
from gpusched.addons.slurm.settings import handover_settings
from gpusched.model.execution import (
    EngineEvent,
    NativeRun,
    NativeRunStarted,
    OpenRun,
    Order,
    RunAccepted,
    RunEnded,
    RunNeverStarted,
    SignalOrder,
    StopOrder,
    Ticket,
)
from gpusched.model.job import Job, Run
from gpusched.model.queue_settings import QueueSettings
from gpusched.model.settings import Settings
from gpusched.model.spec import JobSpec
from gpusched.ports import Clock

log = getLogger(__name__)

NODE = "slurm"
"""Where handed-over runs are, to the daemon."""
_HANDS = 4
"""Commands for single runs at once."""
_AGAIN_S = (5.0, 15.0, 60.0)
"""Between attempts to submit a run while Slurm does not answer."""
_REPEAT_CANCEL_S = 60.0
_RECORD_PATIENCE_S = 60.0
"""How long the record of an ended job may take to become visible: shared storage keeps what it knows of a folder."""
_LOOK_AGAIN_S = 10.0
_MOST_SHOWN = 20
"""Jobs that scontrol is asked about at a time."""


@dataclass(slots=True)
class _Handed:
    """One run, as the engine knows it; changed under the engine's lock."""

    run: str
    native: NativeRun
    ticket: Ticket | None = None
    id: str | None = None
    is_doubtful: bool = False
    """It may have been submitted: to be looked for before anything else."""
    is_busy: bool = False
    """A thread is at it."""
    attempts: int = 0
    next_at: float = 0.0
    """No new attempt before this instant of the monotonic clock."""
    has_started: bool = False
    has_ended: bool = False
    stop: str | None = None
    signalled_at: float | None = None
    cancelled_at: float | None = None
    state: NativeState | None = None
    gone_at: float | None = None
    """Since when squeue answers without it, by the monotonic clock."""
    ended_at: float | None = None
    """Since when Slurm says that it has ended, likewise."""
    trouble: str | None = None


class SlurmEngine:
    """Runs handed over to Slurm.

    Args: folder: of the answers of sbatch, private to the daemon. records: folder of the records, absolute or below
    each user's home.
    """

    def __init__(
        self,
        commands: SlurmCommands,
        folder: str,
        records: str,
        clock: Clock,
        *,
        poll_s: float = 7.0,
        lost_after_s: float = 300.0,
    ) -> None:
        self._commands = commands
        self._folder = folder
        self._records = records
        self._clock = clock
        self._poll_s = poll_s
        self._lost_after_s = lost_after_s
        self._lock = threading.Lock()
        self._runs: dict[str, _Handed] = {}
        self._events: list[EngineEvent] = []
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._due = threading.Event()
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        self._wake: Callable[[], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._accounts: dict[tuple[int, str], Account] = {}
        self.node = NODE
        self._why_not: tuple[float, str | None] = (float("-inf"), None)
        self.trouble: str | None = None
        """Why squeue does not answer, as a sentence; None when it does."""

    # --- the protocol ---------------------------------------------------------------------------------

    def adopt(self, runs: Sequence[OpenRun]) -> None:
        os.makedirs(self._folder, mode=0o700, exist_ok=True)
        with self._lock:
            for known in runs:
                self._take(known, is_doubtful=True)
            kept = {self._file_name(one) for one in self._runs.values()}
        with contextlib.suppress(OSError):
            for name in os.listdir(self._folder):
                if name not in kept:
                    os.unlink(os.path.join(self._folder, name))
        self._attend()
        self._due.set()

    def reconcile(self, runs: Sequence[OpenRun], ended: Iterable[str] = ()) -> None:
        with self._lock:
            for known in runs:
                self._take(known, is_doubtful=known.ticket is None)
        self._forget(ended)
        self._attend()
        self._due.set()

    def order(self, run: str, order: Order) -> None:
        with self._lock:
            handed = self._runs.get(run)
            if handed is None or handed.has_ended:
                return
            if isinstance(order, StopOrder):
                if order.why != "shutdown":
                    handed.stop = handed.stop or order.why
                    # Asked for again: do not wait before it is repeated.
                    handed.cancelled_at = None
            elif isinstance(order, SignalOrder) and handed.id is not None:
                batch = ("--batch",) if order.to == "main" else ("--full",) if order.to == "full" else ()
                words = (f"--signal={order.signal}", *batch, handed.id)
                self._jobs.put(partial(self._scancel, handed, *words))
        self._attend()
        self._due.set()

    def events(self) -> list[EngineEvent]:
        with self._lock:
            found, self._events = self._events, []
        return found

    def _forget(self, runs: Iterable[str]) -> None:
        with self._lock:
            gone = [handed for run in runs if (handed := self._runs.pop(run, None)) is not None]
        for handed in gone:
            for path in self._files(handed):
                with contextlib.suppress(OSError):
                    os.unlink(path)
            if handed.id is not None or handed.has_ended:
                self._jobs.put(partial(self._remove_record, handed))
        if gone:
            self._begin()

    def owners(self, pids: Iterable[int]) -> Mapping[int, str]:
        """None: their processes are elsewhere."""
        return {}

    def checkpoints(self) -> Mapping[str, float]:
        """None: their folders are on other machines."""
        return {}

    def cpu_seconds(self, runs: Iterable[str]) -> Mapping[str, float]:
        """None: Slurm accounts for them."""
        return {}

    def set_waker(self, wake: Callable[[], None] | None) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop = asyncio.get_running_loop()
        self._wake = wake
        self._attend()

    def close(self) -> None:
        self._is_closed = True
        self._due.set()
        for _ in self._threads:
            self._jobs.put(None)

    # --- what others ask -------------------------------------------------------------------------------

    def losses(self, spec: JobSpec) -> list[str]:
        return check_losses(HANDOVER, spec_values(spec))

    def check(self, job: Job, queue: QueueSettings | None) -> None:
        check_script(job, queue)

    def script(
        self, job: Job, run: Run, queue: QueueSettings | None, script: bytes | None, env: Mapping[str, str]
    ) -> bytes:
        return job_script(job, run, queue, script, env)

    def why_not(self) -> str | None:
        """Why no job can be handed over; rechecked from time to time."""
        at, why = self._why_not
        if time.monotonic() - at > _LOOK_AGAIN_S:
            why = why_not(self._commands.folder)
            self._why_not = time.monotonic(), why
        return why

    def status(self, run: str) -> str | None:
        """What Slurm says of a run, or why it does not have it yet, as a clause; None for an unknown run."""
        handed = self._runs.get(run)
        if handed is None:
            return None
        if handed.id is None:
            return "is being handed over to Slurm" + (f": {handed.trouble}" if handed.trouble else "")
        text, state = f"is in Slurm as job {handed.id}", handed.state
        if state is not None:
            text += f": {state.state}" + (f" ({state.reason})" if state.reason else "")
            if state.state == "PENDING" and state.start_at is not None:
                text += time.strftime(", expected to start at %Y-%m-%dT%H:%M:%S", time.localtime(state.start_at))
        return text + (f"; {self.trouble}" if self.trouble else "")

    # --- runs ------------------------------------------------------------------------------------------

    def _take(self, known: OpenRun, *, is_doubtful: bool) -> None:
        """Take in a run as the table has it."""
        native = known.native
        if native is None:
            return
        handed = self._runs.get(known.run)
        if handed is None:
            handed = self._runs[known.run] = _Handed(known.run, native, known.ticket, native.id)
            handed.is_doubtful = native.id is None and is_doubtful
        order = known.pending_order
        if isinstance(order, StopOrder) and order.why != "shutdown":
            handed.stop = handed.stop or order.why

    def _file_name(self, handed: _Handed) -> str:
        return f"{handed.native.mark}.out"

    def _files(self, handed: _Handed) -> tuple[str, ...]:
        return (os.path.join(self._folder, self._file_name(handed)),)

    def _record_of(self, handed: _Handed) -> str:
        account = self._account(handed)
        return os.path.join(account.home, self._records, handed.native.mark)

    def _account(self, handed: _Handed) -> Account:
        key = handed.native.uid, handed.native.user
        if key not in self._accounts:
            self._accounts[key] = self._commands.account(*key)
        return self._accounts[key]

    def _tell(self, *events: EngineEvent) -> None:
        with self._lock:
            self._events += events
        wake, loop = self._wake, self._loop
        if wake is not None and loop is not None and not self._is_closed:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._wake_if_open)

    def _wake_if_open(self) -> None:
        if self._wake is not None:
            self._wake()

    # --- threads ---------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start the threads, when there is something to do for the first time."""
        if self._threads or self._is_closed:
            return
        self._threads = [
            threading.Thread(target=self._carry_out, name=f"slurm-{number}", daemon=True) for number in range(_HANDS)
        ]
        for thread in (*self._threads, threading.Thread(target=self._watch, name="slurm-watch", daemon=True)):
            thread.start()

    def _carry_out(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                log.exception("handing over to Slurm")

    def _watch(self) -> None:
        next_at = time.monotonic()
        while not self._is_closed:
            self._due.wait(max(0.05, min(next_at - time.monotonic(), 1.0)))
            self._due.clear()
            if self._is_closed or not self._runs:
                continue
            try:
                if time.monotonic() >= next_at or self._has_doubts():
                    next_at = time.monotonic() + self._poll_s
                    self._sync()
                self._attend()
            except Exception:
                log.exception("asking Slurm about jobs")

    def _has_doubts(self) -> bool:
        """Whether to look for a run at once: this daemon has not asked Slurm about it yet."""
        now = time.monotonic()
        with self._lock:
            return any(one.is_doubtful and not one.is_busy and one.next_at <= now for one in self._runs.values())

    def _attend(self) -> None:
        """Pass what is due for single runs to the threads."""
        now = time.monotonic()
        with self._lock:
            for handed in self._runs.values():
                if handed.is_busy or handed.has_ended or handed.is_doubtful:
                    continue
                if handed.id is None:
                    if handed.next_at <= now:
                        handed.is_busy = True
                        self._jobs.put(partial(self._free, handed, self._submit))
                elif handed.stop is not None and self._stop_is_due(handed, now):
                    handed.is_busy = True
                    self._jobs.put(partial(self._free, handed, self._stop))
            is_needed = bool(self._runs)
        if is_needed:
            self._begin()

    def _free(self, handed: _Handed, action: Callable[[_Handed], None]) -> None:
        try:
            action(handed)
        finally:
            handed.is_busy = False
            self._due.set()

    # --- handing over ----------------------------------------------------------------------------------

    def _submit(self, handed: _Handed) -> None:
        now = self._clock.now()
        if handed.stop is not None or handed.ticket is None:
            why = "it was stopped before Slurm had it" if handed.stop is not None else "Slurm never had it"
            handed.has_ended = True
            self._tell(RunNeverStarted(handed.run, now, why))
            return
        try:
            account = self._account(handed)
            record = self._record_of(handed)
        except (KeyError, OSError, ValueError) as error:
            self._refused(handed, f"its user is not known here: {error}")
            return
        script = (handed.ticket.script or b"").replace(RECORD.encode(), os.fsencode(shlex.quote(record)), 1)
        folders = {os.path.dirname(path) for path in (handed.ticket.stdout_path, handed.ticket.stderr_path) if path}
        self._commands.shell(MAKE_FOLDERS, sorted(folders), account)
        path = self._files(handed)[0]
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.lseek(descriptor, 0, os.SEEK_SET)
            # Killed from here on, the daemon does not know whether Slurm has it.
            handed.is_doubtful = True
            answer = self._commands.submit(script, descriptor, account)
        except BlockingIOError:
            handed.is_doubtful = True
            return
        finally:
            os.close(descriptor)
        self._submitted(handed, answer, path)

    def _submitted(self, handed: _Handed, answer: CommandAnswer, path: str) -> None:
        number = accepted_id(_read(path))
        if number is not None:
            self._accepted(handed, number)
            return
        handed.trouble = f"sbatch: {answer.said}"
        if answer.code not in (None, 0) and not may_be_accepted_later(answer.error):
            self._refused(handed, f"Slurm refused it: {answer.said}")
            return
        # It may have been accepted all the same, and the answer was lost.
        wait_s = _AGAIN_S[min(handed.attempts, len(_AGAIN_S) - 1)]
        handed.attempts += 1
        handed.next_at = time.monotonic() + wait_s
        log.warning("run %s is not handed over yet: %s", handed.run, handed.trouble)

    def _accepted(self, handed: _Handed, number: str) -> None:
        with self._lock:
            handed.id, handed.is_doubtful, handed.trouble = number, False, None
            handed.gone_at = None
        self._tell(RunAccepted(handed.run, self._clock.now(), number))

    def _refused(self, handed: _Handed, why: str) -> None:
        handed.has_ended, handed.is_doubtful = True, False
        self._tell(RunEnded(handed.run, None, self._clock.now(), launch_error=why))

    # --- stopping --------------------------------------------------------------------------------------

    def _stop_is_due(self, handed: _Handed, now: float) -> bool:
        if handed.cancelled_at is not None:
            return now - handed.cancelled_at >= _REPEAT_CANCEL_S
        return handed.signalled_at is None or now - handed.signalled_at >= handed.native.grace_s

    def _stop(self, handed: _Handed) -> None:
        assert handed.id is not None
        now = time.monotonic()
        if handed.native.signal is not None and handed.has_started and handed.signalled_at is None:
            handed.signalled_at = now
            self._scancel(handed, f"--signal={handed.native.signal}", "--batch", handed.id)
            return
        handed.cancelled_at = now
        self._scancel(handed, handed.id)

    def _scancel(self, handed: _Handed, *words: str) -> None:
        answer = self._commands.slurm("scancel", *words, account=self._account(handed))
        if not answer.is_good:
            log.warning("scancel %s of run %s: %s", " ".join(words), handed.run, answer.said)

    def _remove_record(self, handed: _Handed) -> None:
        with contextlib.suppress(KeyError, OSError, ValueError):
            self._commands.shell(REMOVE_RECORDS, [self._record_of(handed)], self._account(handed))

    # --- asking ----------------------------------------------------------------------------------------

    def _sync(self) -> None:
        """Ask about all runs with one squeue, and follow up what it says."""
        with self._lock:
            runs = [one for one in self._runs.values() if not one.has_ended]
        # Only now: an answer that is asked for later shows what these have submitted.
        settled = {one.run for one in runs if one.is_doubtful and not one.is_busy and self._has_sbatch_ended(one)}
        for handed in runs:
            if handed.is_doubtful and handed.run not in settled:
                handed.next_at = time.monotonic() + 1.0
        if not any(one.id is not None or one.run in settled for one in runs):
            return
        uids = ",".join(sorted({str(one.native.uid) for one in runs}))
        answer = self._commands.slurm(
            "squeue", "--noheader", "--states=all", f"--user={uids}", f"--format={QUEUE_FORMAT}"
        )
        if not answer.is_good:
            self._has_trouble(f"squeue: {answer.said}")
            for handed in runs:
                if handed.is_doubtful:
                    handed.next_at = time.monotonic() + self._poll_s
            return
        self._has_trouble(None)
        jobs = read_queue(answer.output)
        of_mark = by_mark(jobs, (one.native.mark for one in runs if one.run in settled))
        for handed in runs:
            if handed.run in settled:
                self._settle(handed, of_mark.get(handed.native.mark))
        self._follow_up([one for one in runs if one.id is not None], {job.id: job for job in jobs})

    def _has_trouble(self, text: str | None) -> None:
        if text is not None and text != self.trouble:
            log.warning("%s; nothing is concluded from that about any job", text)
        elif text is None and self.trouble is not None:
            log.info("squeue answers again")
        self.trouble = text

    def _has_sbatch_ended(self, handed: _Handed) -> bool:
        """Whether no sbatch can still submit the run, not even one of an earlier daemon."""
        try:
            descriptor = os.open(self._files(handed)[0], os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        return True

    def _settle(self, handed: _Handed, job: NativeState | None) -> None:
        """Decide about a run that may have been submitted."""
        number = job.id if job is not None else accepted_id(_read(self._files(handed)[0]))
        if number is None:
            # Slurm may have forgotten a job that ended while the daemon was away.
            try:
                record = self._record_of(handed)
                found = self._commands.records([record], self._account(handed))
            except (KeyError, OSError, ValueError):
                found = {}
            if found is None:
                handed.next_at = time.monotonic() + self._poll_s
                return
            number = next((one.claim for one in found.values()), None)
        if number is not None:
            self._accepted(handed, number)
            return
        with self._lock:
            handed.is_doubtful = False

    def _follow_up(self, runs: list[_Handed], listed: Mapping[str, NativeState]) -> None:
        now = time.monotonic()
        ended: list[_Handed] = []
        gone: list[_Handed] = []
        for handed in runs:
            state = listed.get(handed.id or "")
            if state is None:
                handed.gone_at = now if handed.gone_at is None else handed.gone_at
                gone.append(handed)
                continue
            handed.gone_at = None
            self._note(handed, state, ended)
        for state in self._ask_about([one.id or "" for one in gone]):
            for handed in [one for one in gone if one.id == state.id]:
                gone.remove(handed)
                self._note(handed, state, ended)
        records = self._read_records([*ended, *gone])
        self._ask_for_codes([one for one in ended if one.run in records and records[one.run].code is None])
        for handed in ended:
            if (record := records.get(handed.run)) is not None:
                self._end(handed, record, is_gone=False)
        for handed in gone:
            if (record := records.get(handed.run)) is not None:
                self._end(handed, record, is_gone=True)

    def _ask_for_codes(self, runs: Iterable[_Handed]) -> None:
        """Ask how jobs have failed whose wrapper was killed before it could say so: squeue does not tell."""
        failed = {one.id or "": one for one in runs if one.state is not None and one.state.state == "FAILED"}
        for state in self._ask_about([*failed]):
            if state.has_ended:
                failed[state.id].state = state

    def _note(self, handed: _Handed, state: NativeState, ended: list[_Handed]) -> None:
        handed.state = state
        if state.has_ended:
            handed.ended_at = time.monotonic() if handed.ended_at is None else handed.ended_at
            ended.append(handed)
        elif state.has_begun:
            self._started(handed, state.start_at, state.nodes)

    def _started(self, handed: _Handed, start_at: float | None, nodes: str | None) -> None:
        if not handed.has_started:
            handed.has_started = True
            now = self._clock.now()
            self._tell(NativeRunStarted(handed.run, now if start_at is None else min(start_at, now), nodes))

    def _ask_about(self, ids: Sequence[str]) -> list[NativeState]:
        """Jobs that squeue no longer lists, as sacct or scontrol knows them."""
        if not ids:
            return []
        if self._commands.has("sacct"):
            answer = self._commands.slurm(
                "sacct", "-P", "-n", "-X", f"--jobs={','.join(ids)}", f"--format={ACCOUNTING_FORMAT}"
            )
            if answer.is_good:
                found = {one.id: one for one in read_accounting(answer.output)}
                return [found[number] for number in ids if number in found]
        if not self._commands.has("scontrol"):
            return []
        shown = []
        for number in ids[:_MOST_SHOWN]:
            answer = self._commands.slurm("scontrol", "show", "job", "--oneliner", number)
            if answer.is_good and (job := read_job(answer.output)) is not None and job.id == number:
                shown.append(job)
        return shown

    def _read_records(self, runs: Iterable[_Handed]) -> dict[str, RunRecord]:
        """Records of these runs, one question for each user; without those that cannot be looked at now."""
        found: dict[str, RunRecord] = {}
        of_user: dict[tuple[int, str], list[_Handed]] = {}
        for handed in runs:
            of_user.setdefault((handed.native.uid, handed.native.user), []).append(handed)
        for some in of_user.values():
            try:
                folders = {self._record_of(one): one for one in some}
                records = self._commands.records(list(folders), self._account(some[0]))
            except (KeyError, OSError, ValueError) as error:
                log.warning("the records of %s cannot be read: %s", some[0].native.user, error)
                records = {path: RunRecord() for path in folders} if isinstance(error, KeyError) else None
            for path, record in (records or {}).items():
                found[folders[path].run] = record
        return found

    def _end(self, handed: _Handed, record: RunRecord, *, is_gone: bool) -> None:
        """Report the end of a run, unless more is to be learned of it."""
        assert handed.id is not None
        if record.claim is not None and record.claim != handed.id:
            # Slurm had two jobs for it, and that one runs.
            log.warning("run %s is Slurm's job %s, not %s", handed.run, record.claim, handed.id)
            handed.state = handed.ended_at = None
            self._accepted(handed, record.claim)
            return
        now = time.monotonic()
        if record.code is None:
            since = handed.gone_at if is_gone else handed.ended_at
            needs_code = is_gone or (handed.state is not None and handed.state.state == "FAILED")
            has_code = handed.state is not None and (
                handed.state.exit_code is not None or handed.state.signal is not None
            )
            patience_s = self._lost_after_s if is_gone else 0.0 if has_code else _RECORD_PATIENCE_S
            if needs_code and since is not None and now - since < patience_s:
                return
        if record.start_at is not None:
            self._started(handed, record.start_at, record.nodes)
        handed.has_ended = True
        state = None if is_gone else handed.state
        self._tell(outcome(handed.run, handed.id, state, record, handed.stop, self._clock.now()))


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 16)
    except OSError:
        return ""


def open_engine(all_settings: Settings, folder: str, clock: Clock, *, is_root: bool) -> SlurmEngine | None:
    """The engine of the site's Slurm; None unless the settings name its commands.

    Args: folder: of the answers of sbatch; is_root: whether jobs are handed over as their users.
    """
    settings = handover_settings(all_settings)
    if settings.commands is None:
        return None
    commands = SlurmCommands(settings.commands, settings.deadline_s, is_root=is_root)
    return SlurmEngine(
        commands,
        folder,
        settings.folder,
        clock,
        poll_s=settings.poll_interval_s,
        lost_after_s=settings.lost_after_s,
    )
