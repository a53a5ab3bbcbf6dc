"""A daemon like the machine of the golden files, and a shell in which Slurm's commands are typed.

One node `node1` with 8 cores, 24105 MiB and four simulated GPUs of type `fake`; partitions main (the default), over and
debug; accounts physics and chem; QOS normal, urgent and capped, which allows two GPUs a user here and one there, where
a request above it pends for ever. The one user of a personal daemon stands for alice and for bob, but bob's account is
chem: see `golden_cases`.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import is_alive, wait_until
from warm import SLURM_COMMANDS, commands, interpreter_settings, nest

from gpusched.client import DaemonConnection
from gpusched.errors import DaemonUnreachable, NotReady
from gpusched.slurm_commands import write_commands

CONFIG = """\
[node]
name = "node1"
cpus = 8
mem_mib = 24105

[default]
queue = "main"
qos = "normal"
time_limit_s = 3600

[slurm]
cluster_name = "lab"

[life]
grace_s = 2

[limit]
array = 1001

[queue.main]
max_time_s = 86400
default_time_s = 3600
[queue.over]
max_time_s = 86400
default_time_s = 3600
[queue.debug]
max_time_s = 600
default_time_s = 600

[qos.normal]
[qos.urgent]
factor = 1.0
preempts = []
[qos.capped]
max_gpus_per_user = 2
max_jobs_per_user = 2
max_time_s = 600

[account.physics]
users = ["{user}"]
[account.chem]
users = ["bob"]
"""

SCRIPTS = {
    "job.sh": "#!/bin/bash\n#SBATCH --job-name=train\n#SBATCH -o out-%j.txt\n#SBATCH --gres=gpu:1\n"
    'echo "args: $# $*"\necho "gpu: $CUDA_VISIBLE_DEVICES"\n',
    "job.py": "#!/usr/bin/env python3\n#SBATCH -o py-%j.txt\nprint('from python')\n",
    "late.sh": "#!/bin/bash\n#SBATCH -J early\necho started\n#SBATCH -J toolate\n",
    "fail3.sh": "#!/bin/bash\nexit 3\n",
    "nobang.sh": "echo hello\n",
    "empty.sh": "",
    "dos.sh": "#!/bin/bash\r\necho hello\r\n",
    "badopt.sh": "#!/bin/bash\n#SBATCH --nosuch=1\necho hello\n",
}

_OF_A_SHELL = re.compile(r"[|&;<>()$`\\*?\[\]#~{}!\n]")
"""What a shell would act upon."""
_KEPT = ("PATH", "USER", "LOGNAME", "SHELL", "TMPDIR", "LANG", "LC_ALL")


@dataclass
class Typed:
    """What a command line left."""

    code: int
    out: str
    err: str


@dataclass
class SlurmLab:
    """A scheduler's home, and the folder in which commands are typed."""

    root: Path
    config: str = CONFIG
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.home, self.work, self.bin = (self.root / name for name in ("home", "work", "bin"))
        for folder in (self.home, self.work, self.bin):
            folder.mkdir(mode=0o700, parents=True)
        (self.home / "config.toml").write_text(self.config.replace("{user}", user()))
        for name, text in SCRIPTS.items():
            (self.work / name).write_bytes(text.encode())
        write_commands(str(self.bin))
        for name in ("gsub", "gcancel", "gq", "gwait", "gctl", "gpusched"):
            _write_own(self.bin / name)
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        self.env = {
            **kept,
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            # A login shell that a test kills must not leave locks of what the developer's own profile starts.
            "HOME": str(self.root),
            "TZ": "UTC",
            "GPUSCHED_HOME": str(self.home),
            "GPUSCHED_FAKE_GPUS": "4xfake:16GiB",
            **self.env,
        }
        self._is_to_start = True

    def type(self, line: str, stdin: bytes = b"", timeout_s: float = 120.0, **env: str) -> Typed:
        """Run one line of shell in the work folder, without a terminal.

        The first one finds a daemon that was forked, see `warm`, where it would start one. A line that is one command
        without anything for a shell to do is forked as well.
        """
        is_to_start, self._is_to_start = self._is_to_start and not env, False
        if is_to_start:
            self.start()
        given = {**self.env, **env}
        words = [] if _OF_A_SHELL.search(line) or len(stdin) > 1 << 16 else shlex.split(line)
        nest_of_commands = commands(given) if words and words[0] in SLURM_COMMANDS else None
        if nest_of_commands is not None:
            code, out, err = nest_of_commands.run(words[0], words[1:], given, self.work, stdin, timeout_s)
            return Typed(code, out.decode(), err.decode())
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.work,
            env=given,
            input=stdin,
            capture_output=True,
            timeout=timeout_s,
        )
        return Typed(done.returncode, done.stdout.decode(), done.stderr.decode())

    def ok(self, line: str, **env: str) -> str:
        """Run a line that must succeed; returns its standard output."""
        done = self.type(line, **env)
        assert done.code == 0, (line, done)
        return done.out

    def submit(self, words: str, **env: str) -> str:
        """`sbatch --parsable` with these words; returns the id."""
        return self.ok(f"sbatch --parsable {words}", **env).strip()

    def job(self, job_id: str) -> dict[str, Any]:
        """Everything about a job, as gpusched's own API tells it."""
        with DaemonConnection(str(self.home / "run" / "api.sock")) as client:
            return dict(client.call("GET", f"/v1/jobs/{job_id}")["job"])

    def state(self, job_id: str) -> str:
        """State of a job, also of an ended one."""
        return str(self.job(job_id)["state"])

    def wait_state(self, job_id: str, *states: str, timeout_s: float = 60.0) -> str:
        """Wait until a job is in one of these states; returns it."""
        found = ""

        def is_there() -> bool:
            nonlocal found
            found = self.state(job_id)
            return found in states

        wait_until(is_there, timeout_s=timeout_s, what=f"job {job_id} to be {' or '.join(states)}")
        return found

    def wait(self, *ids: str, timeout_s: float = 60.0) -> None:
        """Wait until jobs have ended, however."""
        path = f"/v1/wait?ids={','.join(ids)}&timeout_s=5"
        with DaemonConnection(str(self.home / "run" / "api.sock")) as client:
            wait_until(lambda: client.call("GET", path)["done"], timeout_s=timeout_s, what=f"jobs {ids} to end")

    def text(self, name: str, timeout_s: float = 60.0) -> str:
        """Content of a file in the work folder, once it is there."""
        path = self.work / name
        wait_until(path.exists, timeout_s=timeout_s, what=f"{name} to be written")
        return path.read_text()

    def submit_golden_queue(self) -> dict[int, str]:
        """The queue of golden cases 83 to 95, some running and some pending for every reason; golden id -> ours.

        By the golden command lines themselves, so that options, names and limits are those. But jobs 36 and 37 ask for
        two cores each: ours would start at once on the one that is left, where Slurm looks for such gaps later.
        """
        from golden_cases import Places, case

        ids: dict[int, str] = {}
        for number, golden_id in zip(range(83, 96), range(25, 38), strict=True):
            line = Places(jobs=ids).command(case("sbatch", number))
            if golden_id in (36, 37):
                line = line.replace("sbatch", "sbatch -c 2")
            ids[golden_id] = self.ok(line).split()[-1]
        for running in (25, 27):
            self.wait_state(ids[running], "RUNNING")
        return ids

    def start(self, **env: str) -> None:
        """Start the daemon; where it refuses to, or dies as the environment says, the next command will say so."""
        if nest().settings != interpreter_settings(self.env):
            self.type("gpusched daemon start", **env)
            return
        (self.home / "log").mkdir(mode=0o700, exist_ok=True)
        reader, writer = os.pipe()
        with open(self.home / "log" / "gpuschedd.out", "ab") as out:
            forked = nest().start([], {**self.env, **env}, out.fileno(), writer)
        os.close(writer)
        with open(reader, encoding="utf-8") as lines:
            if lines.readline() != "ready\n":
                forked.wait(30)

    def kill_daemon(self) -> None:
        """Kill the daemon, and wait until nothing of it holds its lock."""
        with DaemonConnection(str(self.home / "run" / "api.sock")) as client:
            pid = int(client.call("GET", "/v1/status")["daemon"]["pid"])
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(pid), what="the daemon to end")

    def outlast(self, job_id: str, *states: str) -> None:
        """Wait until a job is in one of these states, and start the daemon again when it has died."""

        def is_there() -> bool:
            try:
                return self.state(job_id) in states
            except (OSError, DaemonUnreachable, NotReady):
                self.start()
                return False

        wait_until(is_there, what=f"job {job_id} to be {' or '.join(states)}")

    def close(self) -> None:
        """End all jobs and the daemon."""
        socket = self.home / "run" / "api.sock"
        try:
            with DaemonConnection(str(socket)) as client:
                users = sorted({job["user"] for job in client.call("GET", "/v1/jobs")["jobs"]})
                if users:
                    client.call("POST", "/v1/jobs/cancel", {"users": users})
                wait_until(lambda: not client.call("GET", "/v1/jobs")["jobs"], what="jobs to end")
                client.call("POST", "/v1/shutdown")
            wait_until(lambda: not socket.exists(), what="the daemon to end")
        except DaemonUnreachable:
            # A test has ended it, perhaps without its jobs.
            self.type('gcancel --all -y; ids=$(gq --quiet); [ -z "$ids" ] || gwait --timeout 60s $ids', timeout_s=120)
            self.type("gpusched daemon stop")


def user() -> str:
    """Who runs the tests."""
    return getpass.getuser()


def _write_own(path: Path) -> None:
    module = "admin" if path.name == "gpusched" else path.name
    path.write_text(f"#!{sys.executable}\nfrom gpusched.cli.{module} import main\nraise SystemExit(main())\n")
    path.chmod(0o755)
