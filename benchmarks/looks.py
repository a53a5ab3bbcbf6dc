"""What looks at a long queue cost: whole commands with 10,000 pending jobs, as multiples of `python3 -c pass` in the
same run; what a submission takes while others look; and when the daemon rests again after the last look.

Each look is taken twice in a round: first after something has changed, then again while nothing has.
"""

from __future__ import annotations

import http.client
import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median

from benchmarks.harness import Bench, percentile, scheduler
from benchmarks.page import SERVE, sign_in
from gpusched.slurm_commands import write_commands

_JOBS = 10_000
_CLASSES = (200, 1, 960)
_ROUNDS = 5
_GSUBS = 60
_IDLE_SHARE = 0.02
"""Of a core: a daemon that uses less rests."""
GOALS = {
    "gq": 7.0,
    "gq --json": 19.0,
    "gq --start": 23.0,
    "gq --why FIRST": 12.0,
    "gq --why MIDDLE": 12.0,
    "gq --why LAST": 12.0,
    "gq --priority": 15.0,
    "squeue": 15.0,
    "squeue --json": 30.0,
    "scontrol show job MIDDLE": 8.0,
    "page /queue": 12.0,
}
"""Multiples of a bare interpreter that each look may take with 200 classes; twice that with fewer or more."""


@dataclass(slots=True)
class _Look:
    """Samples of one look, in seconds."""

    took_s: list[float] = field(default_factory=list)
    client_cpu_s: list[float] = field(default_factory=list)
    daemon_cpu_s: list[float] = field(default_factory=list)

    def text(self, bare: _Look) -> str:
        """Wall time as a multiple of the bare interpreter's, and processor times as multiples of its own."""
        wall = median(self.took_s) / median(bare.took_s)
        floor_s = median(bare.client_cpu_s)
        client, daemon = median(self.client_cpu_s) / floor_s, median(self.daemon_cpu_s) / floor_s
        return f"{wall:6.1f} ({client:5.1f} +{daemon:6.1f})"


def main(rounds: int = _ROUNDS) -> None:
    """Print every look's multiples with 200 classes, with one and with 960; then submissions beside looks, and rest."""
    for classes in _CLASSES:
        with scheduler("[node]\ncpus = 8\n", fake_gpus="8xA100:80GiB") as bench, web_page(bench) as look_at_page:
            fill(bench, classes)
            _measure(bench, classes, rounds, look_at_page)
            if classes == _CLASSES[0]:
                _submit_beside(bench)
                _rest(bench)


def fill(bench: Bench, classes: int, jobs: int = _JOBS) -> None:
    """Jobs that start on every card, and pending ones in so many classes, whose jobs come in turn in the queue."""
    each, more = divmod(jobs, classes)
    first = {"argv": ["sleep", "100000"], "work_dir": bench.home, "env": {}, "gpus": 1, "time_limit_s": 90_000}
    bench.client.call("POST", "/v1/jobs", {"spec": {**first, "name": "running"}, "batch": ["sleep 100000"] * 8})
    _await(lambda: _running(bench) == 8, "eight jobs run")
    for number in range(classes):
        spec = {
            **first,
            "name": f"train-{number}",
            "gpus": 1 + number % 4,
            "time_limit_s": 3600 + 60 * number,
        }
        lines = [f"sleep {1000 + line}" for line in range(each + (number < more))]
        if lines:
            bench.client.call("POST", "/v1/jobs", {"spec": spec, "batch": lines})
    _await(lambda: _busy_share(bench, 1.0) < _IDLE_SHARE, "the daemon rests")


def _running(bench: Bench) -> int:
    return len(bench.client.call("GET", "/v1/jobs?states=RUNNING&fields=id")["rows"])


def looks(bench: Bench) -> dict[str, list[str]]:
    """argv of each look, by what is typed."""
    slurm = os.path.join(bench.home, "commands")
    os.makedirs(slurm, exist_ok=True)
    write_commands(slurm)
    rows = bench.client.call("GET", "/v1/jobs?states=PENDING&fields=id&order=queue")["rows"]
    first, middle, last = rows[0][0], rows[len(rows) // 2][0], rows[-1][0]
    return {
        "gq": bench.command("gq"),
        "gq --json": bench.command("gq", "--json"),
        "gq --start": bench.command("gq", "--start"),
        "gq --why FIRST": bench.command("gq", "--why", first),
        "gq --why MIDDLE": bench.command("gq", "--why", middle),
        "gq --why LAST": bench.command("gq", "--why", last),
        "gq --priority": bench.command("gq", "--priority"),
        "squeue": [f"{slurm}/squeue"],
        "squeue --json": [f"{slurm}/squeue", "--json"],
        "scontrol show job MIDDLE": [f"{slurm}/scontrol", "show", "job", middle],
    }


def _measure(bench: Bench, classes: int, rounds: int, look_at_page: Callable[[], None]) -> None:
    commands = looks(bench)
    bare = _Look()
    changed, again = ({name: _Look() for name in GOALS} for _ in range(2))
    for turn in range(rounds + 1):
        if turn == 1:
            # The first round only warms caches of files.
            bare, changed, again = _Look(), {name: _Look() for name in GOALS}, {name: _Look() for name in GOALS}
        for name in GOALS:
            _run([sys.executable, "-c", "pass"], bench, bare)
            _change(bench)
            for samples in (changed[name], again[name]):
                if name in commands:
                    _run(commands[name], bench, samples)
                else:
                    _timed(look_at_page, bench, samples)
    print(
        f"{_JOBS:,} pending jobs in {classes} classes; bare python {median(bare.took_s) * 1e3:.1f} ms, of which"
        f" {median(bare.client_cpu_s) * 1e3:.1f} ms of processor time; multiples: wall (client + daemon)"
    )
    factor = 1.0 if classes == _CLASSES[0] else 2.0
    for name, goal in GOALS.items():
        print(
            f"  {name:<26} after a change {changed[name].text(bare)}   again {again[name].text(bare)}"
            f"   goal {goal * factor:4.0f}"
        )


def _change(bench: Bench) -> None:
    """Change something, so that nothing that was worked out for an earlier look still stands as it is."""
    held = bench.client.call("GET", "/v1/jobs?fields=id&states=PENDING&limit=1")["rows"][0][0]
    bench.client.call("POST", "/v1/jobs/hold", {"ids": [held]})
    bench.client.call("POST", "/v1/jobs/release", {"ids": [held]})


def _run(argv: Sequence[str], bench: Bench, samples: _Look) -> None:
    def run() -> None:
        process = subprocess.Popen(argv, env=bench.env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{' '.join(argv)} ended with {process.returncode}")
        samples.client_cpu_s.append(used.ru_utime + used.ru_stime)

    _timed(run, bench, samples)
    if len(samples.client_cpu_s) < len(samples.took_s):
        samples.client_cpu_s.append(0.0)


def _timed(run: Callable[[], None], bench: Bench, samples: _Look) -> None:
    pid = bench.daemon_pid()
    before_s, began_at = _cpu_s(pid), time.perf_counter()
    run()
    samples.took_s.append(time.perf_counter() - began_at)
    samples.daemon_cpu_s.append(_cpu_s(pid) - before_s)
    if len(samples.client_cpu_s) < len(samples.took_s):
        samples.client_cpu_s.append(0.0)


def _cpu_s(pid: int) -> float:
    """CPU time of all threads of a process so far, to the nanosecond."""
    return time.clock_gettime((~pid << 3) | 2)


def _submit_beside(bench: Bench) -> None:
    """Whole `gsub` commands alone and while one terminal repeats `gq --start` and another shows `gtop`, in turn."""
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(3):
        alone += _submissions(bench)
        with _terminal(bench, bench.command("gtop")), _loop(bench, bench.command("gq", "--start")):
            time.sleep(1.0)
            beside += _submissions(bench)
    factor = percentile(beside, 0.95) / percentile(alone, 0.95)
    print(
        f"gsub alone: median {median(alone) * 1e3:.0f} ms, p95 {percentile(alone, 0.95) * 1e3:.0f} ms; beside"
        f" gq --start and gtop: median {median(beside) * 1e3:.0f} ms, p95 {percentile(beside, 0.95) * 1e3:.0f} ms:"
        f" {factor:.2f} times (goal 1.5)"
    )


def _submissions(bench: Bench) -> list[float]:
    samples = _Look()
    for _ in range(_GSUBS // 3):
        _run(bench.command("gsub", "--parsable", "--time", "1h", "--gpus", "1", "--", "true"), bench, samples)
    return samples.took_s


@contextmanager
def _loop(bench: Bench, argv: Sequence[str]) -> Iterator[None]:
    """A command that is typed again as soon as it has answered."""
    over = threading.Event()

    def repeat() -> None:
        while not over.is_set():
            subprocess.run(argv, env=bench.env, stdout=subprocess.DEVNULL, check=True)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def _terminal(bench: Bench, argv: Sequence[str]) -> Iterator[None]:
    """A command at a terminal of its own, whose output is read and thrown away."""
    ours, theirs = pty.openpty()
    env = {**bench.env, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    process = subprocess.Popen(argv, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)

    def read() -> None:
        try:
            while os.read(ours, 1 << 16):
                pass
        except OSError:
            pass  # the terminal is closed on both sides

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield
        if process.poll() is not None:
            raise RuntimeError(f"{' '.join(argv)} ended with {process.returncode}")
    finally:
        process.terminate()
        process.wait()
        reader.join(5.0)
        os.close(ours)


def _rest(bench: Bench) -> None:
    """What the daemon uses at once after a look, and from two seconds after it."""
    subprocess.run(bench.command("gq", "--start"), env=bench.env, stdout=subprocess.DEVNULL, check=True)
    at_once = _busy_share(bench, 2.0)
    print(
        f"after the last look: {at_once:.1%} of a core for two seconds, then {_busy_share(bench, 10.0):.1%} (goal 1 %)"
    )


def _busy_share(bench: Bench, seconds: float) -> float:
    """The daemon's share of a core."""
    pid = bench.daemon_pid()
    before_s, began_at = _cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    return (_cpu_s(pid) - before_s) / (time.monotonic() - began_at)


def _await(holds: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
    ends_at = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > ends_at:
            raise TimeoutError(what)
        time.sleep(0.05)


@contextmanager
def web_page(bench: Bench) -> Iterator[Callable[[], None]]:
    """A look at the first page of the queue of a `gpusched web` of its own."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVE, bench.client.socket_path], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline().partition(" serves ")[0].rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        cookie = sign_in(bench, connection, port)

        def look() -> None:
            connection.request("GET", "/queue", headers={"Host": f"127.0.0.1:{port}", "Cookie": cookie})
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200, answer.status

        yield look
    finally:
        server.terminate()
        server.wait(10)
