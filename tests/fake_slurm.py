"""A small stand-in for Slurm: programs named sbatch, squeue, ... over a folder of state, for one machine.

`install` writes them; `FakeSlurm` tells them how to behave. A job is a file of its state and one process that runs its
script. What they answer is written as in the recorded output of a real Slurm.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

# What commands need that are typed several times a second is imported above, the rest where it is needed.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

COMMANDS = ("sbatch", "squeue", "scancel", "sacct", "scontrol")
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED")


class FakeSlurm:
    """The state of one such Slurm, and what its commands are to do.

    Behaviours, by command: `fail:TEXT` says so and ends with 1; `hang` does not end while it is set; of sbatch,
    `silent` submits and is killed before it answers, `slow` submits and then does not end while it is set.
    """

    def __init__(self, root: Path, python: str = sys.executable) -> None:
        """Args: python: that all users of it may run."""
        import py_compile

        self.root = root
        self.bin = root / "bin"
        self.jobs_folder = root / "jobs"
        self.bin.mkdir(parents=True, exist_ok=True)
        self.jobs_folder.mkdir(exist_ok=True)
        # Other users may not be able to read it where it is. Compiled, as an interpreter would do each time.
        program = root / "fake_slurm.py"
        program.write_bytes(Path(__file__).read_bytes())
        py_compile.compile(str(program))
        for name in COMMANDS:
            path = self.bin / name
            words = [python, *_program(root), name, str(root)]
            path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
            path.chmod(0o755)

    def behave(self, **how: str | None) -> None:
        """Set how commands behave; None: as usual."""
        with _locked(self.root):
            found = _read(self.root / "how.json")
            found.update(how)
            _write(self.root / "how.json", {name: word for name, word in found.items() if word is not None})

    def jobs(self) -> dict[str, dict[str, Any]]:
        """All jobs by id, ended and forgotten ones included."""
        return {path.stem: _read(path) for path in sorted(self.jobs_folder.glob("*.json"))}

    def submit(self, script: str) -> str:
        """Submit a script; returns its id."""
        import subprocess

        done = subprocess.run([self.bin / "sbatch"], input=script, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def calls(self) -> list[str]:
        """The command lines so far."""
        log = self.root / "calls"
        return log.read_text().splitlines() if log.exists() else []

    def end(self, number: str, state: str, **facts: Any) -> None:
        """End a job in this state, whatever its script does."""
        with _locked(self.root):
            job = _read(self.jobs_folder / f"{number}.json")
            job.update({"state": state, "end": int(time.time()), **facts})
            _write(self.jobs_folder / f"{number}.json", job)
        _kill(job, signal.SIGKILL)

    def forget(self, number: str, *, entirely: bool = False) -> None:
        """squeue and scontrol forget a job, as after MinJobAge; entirely: sacct, too."""
        with _locked(self.root):
            job = _read(self.jobs_folder / f"{number}.json")
            job["forgotten"] = 2 if entirely else 1
            _write(self.jobs_folder / f"{number}.json", job)

    def close(self) -> None:
        for job in self.jobs().values():
            _kill(job, signal.SIGKILL)


def _program(root: Path) -> list[str]:
    """Arguments of an interpreter that runs one of the commands."""
    return ["-ISc", f"import sys; sys.path.append({str(root)!r}); import fake_slurm; fake_slurm.run()"]


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return found


def _write(path: Path, value: dict[str, Any]) -> None:
    path.with_suffix(".new").write_text(json.dumps(value))
    os.replace(path.with_suffix(".new"), path)


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    with open(root / "lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _kill(job: dict[str, Any], number: int, *, batch_only: bool = False) -> None:
    if job.get("pid"):
        try:
            (os.kill if batch_only else os.killpg)(job["pid"], number)
        except ProcessLookupError:
            pass


# --- the commands ------------------------------------------------------------------------------------------


def main(name: str, root: Path, words: list[str]) -> int:
    with _locked(root), open(root / "calls", "a") as log:
        log.write(shlex.join([name, *words]) + "\n")
    how = _read(root / "how.json").get(name, "")
    while _read(root / "how.json").get(name) == "hang":
        time.sleep(0.02)
    if how.startswith("fail:"):
        sys.stderr.write(f"{name}: error: {how[5:]}\n")
        return 1
    return int(globals()[f"_{name}"](root, words, how) or 0)


def _sbatch(root: Path, words: list[str], how: str) -> None:
    import subprocess

    script = sys.stdin.read()
    options = dict(
        shlex.split(line[8:])[0].removeprefix("--").partition("=")[::2]
        for line in script.split("\n")
        if line.startswith("#SBATCH ")
    )
    with _locked(root):
        number = str(max([100, *(int(path.stem) for path in (root / "jobs").glob("*.json"))]) + 1)
        job = {"id": number, "state": "PENDING", "script": script, "options": options, "uid": os.getuid(), "pid": None}
        _write(root / "jobs" / f"{number}.json", job)
    for descriptor in (0, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    # Its own standard output, as a daemon of Slurm's has one.
    subprocess.Popen(
        [sys.executable, *_program(root), "step", str(root), number],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    if how == "silent":
        os.kill(os.getpid(), signal.SIGKILL)
    while _read(root / "how.json").get("sbatch") == "slow":
        time.sleep(0.02)
    print(number, flush=True)


def _step(root: Path, words: list[str], how: str) -> None:
    """Stands for slurmctld and slurmd: waits for its turn, and runs the script of one job."""
    import subprocess

    path = root / "jobs" / f"{words[0]}.json"
    while _read(root / "how.json").get("start") == "never":
        if _read(path)["state"] != "PENDING":
            return
        time.sleep(0.02)
    options = _read(path)["options"]
    output = os.open(options["output"].replace("%%", "%"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    env = {
        **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
        "SLURM_JOB_ID": words[0],
        "SLURM_JOB_NODELIST": "fake1",
        "LC_ALL": "C",
        "SLURM_TIME_FORMAT": "%s",
    }
    file = root / "jobs" / f"{words[0]}.sh"
    file.write_text(_read(path)["script"], errors="surrogateescape")
    with _locked(root):
        job = _read(path)
        if job["state"] != "PENDING":
            return
        process = subprocess.Popen(
            ["/bin/sh", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=options["chdir"],
            env=env,
            start_new_session=True,
        )
        job.update({"state": "RUNNING", "pid": process.pid, "start": int(time.time()), "nodes": "fake1"})
        _write(path, job)
    code = process.wait()
    with _locked(root):
        job = _read(path)
        if job["state"] == "RUNNING":
            job.update({"state": "FAILED" if code else "COMPLETED", "end": int(time.time())})
        job.setdefault("code", code)
        _write(path, job)


def _squeue(root: Path, words: list[str], how: str) -> None:
    form = next(word.partition("=")[2] for word in words if word.startswith("--format="))
    for path in sorted((root / "jobs").glob("*.json")):
        job = _read(path)
        if job.get("forgotten"):
            continue
        facts = {
            "i": job["id"],
            "T": job["state"],
            "r": job.get("reason", "None"),
            "S": str(job.get("start", "N/A")),
            "N": job.get("nodes", ""),
            "k": job["options"].get("comment", "(null)"),
        }
        print(re.sub("%(.)", lambda found, facts=facts: facts[found[1]], form))


def _scancel(root: Path, words: list[str], how: str) -> int:
    number = words[-1]
    path = root / "jobs" / f"{number}.json"
    with _locked(root):
        job = _read(path)
        if not job:
            sys.stderr.write("scancel: error: Kill job error on job id " + number + ": Invalid job id specified\n")
            return 1
        sent = next((int(word.partition("=")[2]) for word in words if word.startswith("--signal=")), None)
        if sent is None and job["state"] in ("PENDING", "RUNNING"):
            job.update({"state": "CANCELLED", "end": int(time.time()), "by": os.getuid()})
            _write(path, job)
    _kill(job, signal.SIGTERM if sent is None else sent, batch_only="--batch" in words)
    return 0


def _code(job: dict[str, Any]) -> str:
    code = int(job.get("code", 0))
    return f"0:{-code}" if code < 0 else f"{code}:0"


def _sacct(root: Path, words: list[str], how: str) -> None:
    wanted = next(word.partition("=")[2] for word in words if word.startswith("--jobs=")).split(",")
    for number in wanted:
        job = _read(root / "jobs" / f"{number}.json")
        if job and job.get("forgotten") != 2:
            state = f"CANCELLED by {job['by']}" if "by" in job else job["state"]
            facts = [number, state, _code(job), job.get("start", "Unknown"), job.get("end", "Unknown"), "fake1"]
            print("|".join(map(str, facts)))


def _scontrol(root: Path, words: list[str], how: str) -> int:
    job = _read(root / "jobs" / f"{words[-1]}.json")
    if not job or job.get("forgotten"):
        sys.stderr.write("slurm_load_jobs error: Invalid job id specified\n")
        return 1
    print(f"JobId={job['id']} JobName=x JobState={job['state']} Reason=None ExitCode={_code(job)} NodeList=fake1")
    return 0


def run() -> None:
    """One of the commands, as typed."""
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
