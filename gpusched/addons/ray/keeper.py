"""Keeps the raylet of this machine running, which kills itself when its head has mistakenly declared it dead.

All of it may end at any moment, the keeper included: runs belong to the first process.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
from filelock import FileLock, Timeout

from gpusched.addons.ray.probe import ask_head, check_versions
from gpusched.addons.ray.site import RayFolder, RayMember, check_ray, check_token, raylet_command, raylet_environment
from gpusched.engine.linux import proctree
from gpusched.errors import DaemonBusy, GpuschedError, NotReady

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
"""Between the end of the raylet and its next start: the first time, and at most."""
_STABLE_S = 60.0
_PERIOD_S = 0.5
_STRAY_CHECK_S = 60.0
_STRAY_STRIKES = 2
"""A raylet that its head does not know, so many times in a row, is outside of the cluster: it is started again."""
_LEAVE_S = 5.0
_MOST_LOG_BYTES = 1 << 20
_MOST_READ_BYTES = 1 << 18
_ENDED = re.compile(r" -- (\w+) \[exit code=(-?\d+)\]")
_ERROR = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception): .+")


class RayKeeper:
    """Args: agent: command of the node's agent."""

    def __init__(self, folder: RayFolder, member: RayMember, agent: list[str]) -> None:
        self._folder, self._member, self._agent = folder, member, agent
        self._raylet: subprocess.Popen[bytes] | None = None
        self._began = self._check_at = 0.0
        self._strikes = self._log_at = 0

    def run(self) -> None:
        """Keep the raylet running until a TERM or INT. Raises: DaemonBusy, NotReady, OSError."""
        check_ray()
        check_token(self._folder.token)
        lock = FileLock(f"{self._folder.keeper}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise DaemonBusy("Ray is already kept running here", "see: gpusched cluster status") from None
        own = proctree.read_process(os.getpid())
        assert own is not None
        with open(self._folder.keeper, "w", encoding="ascii") as file:
            file.write(f"{own.pid} {own.start_ticks}\n")
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _leave)
        wait_s = 0.0
        try:
            while True:
                problem = self._start() or self._watch()
                was_stable = time.monotonic() - self._began > _STABLE_S
                wait_s = FIRST_WAIT_S if was_stable else min(LONGEST_WAIT_S, max(FIRST_WAIT_S, 2 * wait_s))
                self._note(problem)
                time.sleep(wait_s)
        finally:
            self._end()
            os.unlink(self._folder.keeper)
            lock.release()

    def _start(self) -> str | None:
        """Start the raylet; why it cannot be, or None."""
        self._began = time.monotonic()
        end_leftovers(self._folder)
        try:
            if not self._member.is_head:
                check_admission(self._folder, self._member)
            command = raylet_command(self._folder, self._member)
        except GpuschedError as error:
            return f"{error.message}; {error.hint}"
        env = raylet_environment(self._folder, self._member, self._agent, os.environ)
        if os.path.exists(self._folder.log) and os.path.getsize(self._folder.log) > _MOST_LOG_BYTES:
            os.truncate(self._folder.log, 0)
        with open(self._folder.log, "ab") as log:
            self._log_at = log.tell()
            self._raylet = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True
            )
        self._check_at, self._strikes = time.monotonic() + _STRAY_CHECK_S, 0
        return None

    def _watch(self) -> str:
        """Wait until the raylet must be started again; returns why."""
        raylet = self._raylet
        assert raylet is not None
        while raylet.poll() is None:
            time.sleep(_PERIOD_S)
            if self._is_stray():
                self._end()
                return f"the head {self._member.gcs} no longer knew this node; it joins again"
        with open(self._folder.log, "rb") as log:
            log.seek(self._log_at)
            said = log.read(_MOST_READ_BYTES).decode("utf-8", "replace")
        return why_ended(raylet.returncode, said)

    def _is_stray(self) -> bool:
        if self._member.is_head or time.monotonic() < self._check_at:
            return False
        self._check_at = time.monotonic() + _STRAY_CHECK_S
        try:
            known = ask_head(self._member.gcs, self._folder).alive(self._member.name)
        except GpuschedError:
            # Without a head no node is known to it; the raylet waits for its return.
            self._strikes = 0
            return False
        self._strikes = 0 if known is not None and known.address == self._member.address else self._strikes + 1
        return self._strikes >= _STRAY_STRIKES

    def _end(self) -> None:
        if self._raylet is not None:
            self._raylet.terminate()
            try:
                self._raylet.wait(_LEAVE_S)
            except subprocess.TimeoutExpired:
                self._raylet.kill()
                self._raylet.wait()
        end_leftovers(self._folder)

    def _note(self, problem: str) -> None:
        sys.stderr.write(f"{problem}\n")
        sys.stderr.flush()
        with open(self._folder.problem, "w", encoding="utf-8") as file:
            file.write(f"{problem}\n")


def check_admission(folder: RayFolder, member: RayMember) -> None:
    """Raises: NotReady unless the head admits this machine under its name."""
    answer = ask_head(member.gcs, folder)
    check_versions(answer)
    other = answer.alive(member.name)
    if other is not None and other.address != member.address:
        raise NotReady(
            f"another machine, {other.address}, is already node {member.name} of this cluster",
            "join under another name: gpusched cluster join HEAD --name NAME",
        )


def keeper_pid(folder: RayFolder) -> int | None:
    """Pid of the keeper that runs now."""
    try:
        with open(folder.keeper, encoding="ascii") as file:
            pid, start_ticks = map(int, file.read().split())
    except (OSError, ValueError):
        return None
    return pid if proctree.lives(pid, start_ticks) else None


def last_problem(folder: RayFolder) -> str | None:
    """Why the raylet ended last; None if it never did."""
    try:
        with open(folder.problem, encoding="utf-8") as file:
            return file.read().strip() or None
    except OSError:
        return None


def ray_processes(folder: RayFolder) -> Iterator[psutil.Process]:
    """Processes of Ray's that belong to this machine's raylet: all of them name its folder."""
    session = folder.session_path
    for process in psutil.process_iter(["cmdline", "uids"]):
        words, uids = process.info["cmdline"] or [], process.info["uids"]
        is_own = uids is not None and uids.real == os.getuid()
        if is_own and any(f"{session}/" in f"{word}/" for word in words):
            yield process


def end_leftovers(folder: RayFolder) -> None:
    """End what a killed keeper has left: another raylet could not listen on its ports."""
    for process in list(ray_processes(folder)):
        try:
            process.kill()
            process.wait(_LEAVE_S)
        except (psutil.NoSuchProcess, psutil.TimeoutExpired):
            pass


def _leave(number: int, frame: object) -> None:
    raise SystemExit(0)


def why_ended(code: int, said: str) -> str:
    """A sentence about the end of `ray start`. Args: code: its exit code; said: what it printed."""
    parts = [f"its {name} ended with {status}" for name, status in _ENDED.findall(said)]
    errors = _ERROR.findall(said)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    why = ", ".join(dict.fromkeys(parts)) or (errors[-1] if errors else lines[-1] if lines else "it said nothing")
    return f"Ray ended with {code}: {why[:200]}"
