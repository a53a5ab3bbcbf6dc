"""What the benchmarks share: a throwaway scheduler, percentiles, floors."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from gpusched.client import DaemonConnection, connect
from gpusched.scheduler.compiled import is_compiled


@dataclass(frozen=True, slots=True)
class Bench:
    """A running scheduler of its own, with everything below one folder."""

    home: str
    client: DaemonConnection
    env: dict[str, str]

    def daemon_pid(self) -> int:
        """Process id of the daemon."""
        return int(self.client.call("GET", "/v1/status")["daemon"]["pid"])

    def command(self, name: str, *args: str) -> list[str]:
        """argv of a console script, as installed beside this interpreter."""
        script = os.path.join(os.path.dirname(sys.executable), name)
        if os.path.exists(script):
            return [script, *args]
        module = f"from gpusched.cli.{name} import main; import sys; sys.exit(main())"
        return [sys.executable, "-c", module, *args]


@contextmanager
def scheduler(config: str = "", fake_gpus: str = "none") -> Iterator[Bench]:
    """A scheduler in a temporary home, stopped and removed at the end."""
    home = tempfile.mkdtemp(prefix="gpusched-bench-")
    saved = {name: os.environ.get(name) for name in ("GPUSCHED_HOME", "GPUSCHED_FAKE_GPUS", "GPUSCHED_SOCKET")}
    os.environ["GPUSCHED_HOME"] = home
    os.environ.pop("GPUSCHED_SOCKET", None)
    os.environ.pop("GPUSCHED_FAKE_GPUS", None)
    if fake_gpus != "none":
        os.environ["GPUSCHED_FAKE_GPUS"] = fake_gpus
    else:
        config = f'[gpu]\nsource = "none"\n{config}'
    with open(os.path.join(home, "config.toml"), "w", encoding="utf-8") as file:
        file.write(config)
    client = connect()
    try:
        yield Bench(home, client, dict(os.environ))
    finally:
        try:
            client.call("POST", "/v1/jobs/cancel", {"all": True})
            pid = int(client.call("GET", "/v1/status")["daemon"]["pid"])
            client.call("POST", "/v1/shutdown", {})
            while _alive(pid):
                time.sleep(0.01)
        finally:
            client.close()
            shutil.rmtree(home, ignore_errors=True)
            for name, value in saved.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def percentile(samples: Sequence[float], fraction: float) -> float:
    """The sample at this rank, 0 to 1."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * fraction))]


def show(name: str, samples: Sequence[float], unit: str = "ms") -> None:
    """One line: median, p95, extremes and the number of samples."""
    print(
        f"{name:<44} median {percentile(samples, 0.5):9.3f} {unit}   p95 {percentile(samples, 0.95):9.3f} {unit}"
        f"   min {min(samples):8.3f}   max {max(samples):8.3f}   n={len(samples)}"
    )


def time_command(argv: Sequence[str], env: dict[str, str], repeats: int) -> list[float]:
    """Wall milliseconds of a whole process, after one warm-up."""
    samples = []
    for turn in range(repeats + 1):
        began = time.perf_counter()
        subprocess.run(argv, env=env, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        if turn:
            samples.append((time.perf_counter() - began) * 1e3)
    return samples


def bare_python(repeats: int) -> list[float]:
    """The floor of every command: this interpreter doing nothing, in milliseconds."""
    return time_command([sys.executable, "-c", "pass"], dict(os.environ), repeats)


def spawn_floor(repeats: int = 200) -> list[float]:
    """Milliseconds to spawn and await /bin/true from this process."""
    samples = []
    for _ in range(repeats):
        began = time.perf_counter()
        os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
        samples.append((time.perf_counter() - began) * 1e3)
    return samples


def fsync_floor(folder: str, repeats: int = 200) -> list[float]:
    """Milliseconds of a small write and fsync in this folder."""
    path = os.path.join(folder, "fsync-floor")
    fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    samples = []
    try:
        for _ in range(repeats):
            began = time.perf_counter()
            os.write(fd, b"x" * 512)
            os.fsync(fd)
            samples.append((time.perf_counter() - began) * 1e3)
    finally:
        os.close(fd)
        os.unlink(path)
    return samples


def wait_for(predicate: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll until it holds. Raises: TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.005)


def memory_kib(pid: int, key: str = "Pss") -> int:
    """A figure of /proc/PID/smaps_rollup, in KiB."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        for line in file:
            if line.startswith(key + ":"):
                return int(line.split()[1])
    raise KeyError(key)


def cpu_s(pid: int) -> float:
    """CPU time a process has used, user and system."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine() -> str:
    """One line on the machine and what else it is doing."""
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    form = ", compiled planner" if is_compiled() else ""
    return f"python {sys.version.split()[0]}{form}, {len(os.sched_getaffinity(0))} cores, load average {load}"
