"""A server that is reached by ssh, and what is typed on it."""

from __future__ import annotations

import json
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCE = "/srv/gpusched-tried"
CEILING_S = 60.0


class Machine:
    """Commands as root or a user; waits for states."""

    def __init__(
        self,
        address: str,
        ssh_options: str,
        users: tuple[str, ...],
        *,
        patience: float,
        power_cut: str | None,
        keeps_environment: bool,
    ) -> None:
        self.alice, self.bob, self.carol = users
        self.patience = patience
        self.power_cut = power_cut
        self.keeps_environment = keeps_environment
        self._folder = tempfile.TemporaryDirectory(prefix="gpusched-server-")
        shared = f"-o ControlMaster=auto -o ControlPath={self._folder.name}/%r -o ControlPersist=60"
        timeouts = "-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 -o ServerAliveCountMax=8"
        self._ssh = ["ssh", *shlex.split(ssh_options), *shlex.split(timeouts)]
        self._shared = shlex.split(shared)
        self._address = address

    def close(self) -> None:
        """Give the kept connection up."""
        subprocess.run([*self._ssh, *self._shared, "-O", "exit", self._address], capture_output=True, check=False)
        self._folder.cleanup()

    # --- commands -------------------------------------------------------------------------------------

    def try_(self, command: str, user: str = "root", *, stdin: bytes | str = "", fresh: bool = False) -> Done:
        """Run a shell line in a login of this user. Args: fresh: not over the kept connection, which may be dead."""
        words = command if user == "root" else f"runuser -l {user} -c {shlex.quote(command)}"
        shared = [] if fresh else self._shared
        content = stdin.encode() if isinstance(stdin, str) else stdin
        try:
            done = subprocess.run(
                [*self._ssh, *shared, self._address, words],
                input=content,
                capture_output=True,
                timeout=10 * CEILING_S * max(1.0, self.patience),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            pytest.fail(f"{command!r} as {user} did not end within {error.timeout:.0f} s")
        return Done(command, done)

    def root(self, command: str, *, stdin: bytes | str = "") -> str:
        """What a command of root prints; it must succeed."""
        return self.try_(command, stdin=stdin).text()

    def as_(self, user: str, command: str) -> str:
        """What a command of this user prints; it must succeed."""
        return self.try_(command, user).text()

    def typed(self, command: str, answer: str) -> Done:
        """Run a command of root at a terminal and type an answer."""
        with tempfile.TemporaryFile() as keys:
            keys.write(answer.encode())
            keys.seek(0)
            done = subprocess.run(
                [*self._ssh, "-tt", self._address, command], stdin=keys, capture_output=True, check=False
            )
        return Done(command, done)

    def wait(self, predicate: Callable[[], Any], what: str, times: float = 1.0) -> Any:
        """Ask until it holds; what it answered then."""
        deadline = time.monotonic() + times * CEILING_S * self.patience
        while not (found := predicate()):
            if time.monotonic() > deadline:
                raise AssertionError(f"after {times * CEILING_S * self.patience:.0f} s still not: {what}")
            time.sleep(0.2)
        return found

    # --- jobs -----------------------------------------------------------------------------------------

    def submit(self, user: str, words: str) -> str:
        """The id of a new job, which books no core: several are to run at once."""
        return self.as_(user, f"gsub --parsable -c 0 {words}").strip().split("\n")[-1]

    def job(self, job_id: str) -> dict[str, Any]:
        """All that root sees of a job."""
        return dict(json.loads(self.root(f"gshow --json {job_id}"))["jobs"][0])

    def wait_for(self, job_id: str, *states: str, times: float = 1.0) -> dict[str, Any]:
        """The job once it is in one of these states."""
        last: dict[str, Any] = {}

        def there() -> bool:
            last.clear()
            last.update(self.job(job_id))
            return last["state"] in states

        try:
            self.wait(there, f"job {job_id} is {' or '.join(states)}", times)
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {last['state']}: {last['reason_text']}") from None
        return last

    def running(self, user: str, words: str) -> str:
        """A new job, once its first process runs."""
        job_id = self.submit(user, words)
        self.wait_for(job_id, "RUNNING", times=2)
        # It is RUNNING as soon as its GPUs are its own; systemd starts it after that.
        self.wait(lambda: self.pids(job_id), f"job {job_id} has a process")
        return job_id

    def pids(self, job_id: str) -> set[str]:
        """Processes of a job's run, the supervisor left out."""
        run = self.job(job_id)["run"]
        found = self.root(
            f"grep -lz '^GPUSCHED_RUN={job_id}.{run}$' /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3; true"
        )
        return set(found.split())

    # --- the daemon and the machine -------------------------------------------------------------------

    def daemon_pid(self) -> str:
        """Of the service, "0" when it does not run."""
        return self.root("systemctl show -p MainPID --value gpusched.service").strip()

    def answers(self) -> bool:
        """Whether the daemon does."""
        return self.try_("gpusched daemon status").code == 0

    def boot_id(self) -> str:
        """Of the boot that runs; empty while none does."""
        done = self.try_("cat /proc/sys/kernel/random/boot_id && systemctl is-system-running", fresh=True)
        words = done.out.split()
        return words[0] if len(words) == 2 and words[1] in ("running", "degraded") else ""

    def boots_again(self, cause: Callable[[], None]) -> None:
        """Cause a reboot and wait until the machine and its daemon are up."""
        before = self.root("cat /proc/sys/kernel/random/boot_id").strip()
        subprocess.run([*self._ssh, *self._shared, "-O", "exit", self._address], capture_output=True, check=False)
        cause()
        self.wait(lambda: self.boot_id() not in ("", before), "the machine has booted again", 5)
        self.wait(self.answers, "the daemon answers after the boot", 3)

    def put_source(self) -> None:
        """Copy what git knows of this repository."""
        names = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True).stdout
        packed = subprocess.run(
            ["tar", "--null", "-T", "-", "-czf", "-"], cwd=REPOSITORY, input=names, capture_output=True, check=True
        )
        self.root(f"rm -rf {SOURCE} && mkdir {SOURCE} && tar -C {SOURCE} --no-same-owner -xzf -", stdin=packed.stdout)


class Done:
    """What became of a command."""

    def __init__(self, command: str, done: subprocess.CompletedProcess[bytes]) -> None:
        self.command, self.code = command, done.returncode
        self.out, self.err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")

    def text(self) -> str:
        """What it printed. Raises: AssertionError when it failed."""
        assert self.code == 0, f"{self.command!r} ended with {self.code}\n{self.out}\n{self.err}"
        return self.out
