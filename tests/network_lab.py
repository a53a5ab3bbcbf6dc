"""Several machines on this one: each has its own network, process ids, mounts and host name.

    with network(folder) as lab:
        lab["n1"].run("ping", "-c1", "n2")
        lab["n2"].cut()

Machine `nK` has the address 10.99.0.K, reachable from the others only, a boot id of its own, and a shell-like server:
`lab.connect` is a command that runs another on a machine over TCP, as ssh does, so that a link that is cut behaves like
one. Files are shared, except /dev/shm. Nothing outlives the process that made the lab: each machine's first process
ends with it, and the kernel ends all others of the machine and removes its network.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from support import wait_until

PORT = 2200
_PROGRAMS = ("ip", "unshare", "nsenter", "mount")


class LabUnavailable(Exception):
    """Machines cannot be made here; the message says why."""


_FIRST = """
import os, select, signal, socket, subprocess, sys, threading, time

name, boot_id, hosts, port, log, *binds = sys.argv[1:]

def end_with_the_lab():
    while os.read(0, 1):
        pass
    os._exit(0)

def serve():
    server = socket.create_server(("", int(port)), backlog=64)
    while True:
        stream, _ = server.accept()
        child = os.fork()
        if child == 0:
            if os.fork():
                os._exit(0)
            os.setsid()
            with stream.makefile("rb", buffering=0) as lines:
                wanted = b""
                while not wanted.endswith(b"\\0\\n"):
                    more = lines.read(1)
                    if not more:
                        os._exit(0)
                    wanted += more
            argv = wanted[:-2].split(b"\\0")
            for number in (0, 1):
                os.dup2(stream.fileno(), number)
            os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), 2)
            os.closerange(3, 64)
            os.execvp(argv[0], argv)
        stream.close()
        os.waitpid(child, 0)

socket.sethostname(name)
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
binds += [hosts, "/etc/hosts", boot_id, "/proc/sys/kernel/random/boot_id"]
for source, target in zip(binds[::2], binds[1::2]):
    subprocess.run(["mount", "--bind", source, target], check=True)
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)
if os.fork() == 0:
    serve()
threading.Thread(target=end_with_the_lab, daemon=True).start()
os.write(1, b"up\\n")
while True:
    # Reap what loses its parent, as the first process of a machine has to.
    os.wait()
"""

_CLIENT = """
import os, socket, sys, threading

address, *argv = sys.argv[1:]
try:
    stream = socket.create_connection((address, {port}), timeout=10)
except OSError as error:
    sys.exit(f"connect to host {{address}}: {{error.strerror or error}}")
stream.settimeout(None)
stream.sendall(b"\\0".join(map(os.fsencode, argv)) + b"\\0\\n")

def send():
    while data := os.read(0, 65536):
        stream.sendall(data)
    stream.shutdown(socket.SHUT_WR)

threading.Thread(target=send, daemon=True).start()
try:
    while data := stream.recv(65536):
        view = memoryview(data)
        while view:
            view = view[os.write(1, view):]
except OSError as error:
    sys.exit(f"connection to {{address}} lost: {{error.strerror}}")
"""


def children_of(pid: int) -> list[int]:
    """Processes whose parent this is."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                if int(file.read().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(name))
    return found


class Machine:
    """One machine, on or off. Its link to the others can be cut at any time."""

    def __init__(self, lab: Network, number: int) -> None:
        self.name = f"n{number}"
        self.address = f"10.99.0.{number}"
        self.folder = lab.folder / self.name
        self.folder.mkdir(mode=0o700)
        self.log = self.folder / "server.log"
        self.binds: dict[str, str] = {}
        """Files that the machine sees instead of others, by path, from its next start on."""
        self._lab = lab
        self._port = f"port{number}"
        self._mac = f"02:00:00:00:00:{number:02x}"
        self._process: subprocess.Popen[bytes] | None = None
        self._first = 0

    @property
    def is_on(self) -> bool:
        return self._process is not None

    def power_on(self) -> None:
        """Start the machine, with another boot id, and wait until commands can be run on it."""
        assert self._process is None
        boot_id = self.folder / "boot_id"
        boot_id.write_text(f"{uuid.uuid4()}\n")
        binds = [word for path, source in self.binds.items() for word in (source, path)]
        own = ["--pid", "--mount", "--uts", "--ipc", "--propagation", "private", "--mount-proc"]
        argv = [sys.executable, "-IS", "-c", _FIRST, self.name, str(boot_id), str(self._lab.hosts), str(PORT)]
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [*_UNSHARE, *own, *argv, str(self.log), *binds],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment(),
                start_new_session=True,
            )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"up\n":
            self._end()
            raise LabUnavailable(f"a machine cannot be made: {last_line(self.log)}")
        (self._first,) = children_of(self._process.pid)
        for line in (
            # The hardware address stays over restarts, as that of a card does.
            f"link add {self._port} type veth peer name eth0 address {self._mac} netns {self._first}",
            f"link set {self._port} master br0 up",
        ):
            self._lab.ip(line)
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")
        # The server's socket may come after the word that all else is ready.
        wait_until(lambda: self._answers(), what=f"{self.name} to answer")

    def power_off(self) -> None:
        """End every process at once; nothing is said to anybody: the link dies first."""
        if self._process is not None:
            self._lab.ip(f"link delete {self._port}")
            self._end()

    def reboot(self) -> None:
        """Power off and on again."""
        self.power_off()
        self.power_on()

    def cut(self) -> None:
        """Drop everything to and from the machine; connections stay as they are."""
        self._lab.ip(f"link set {self._port} down")

    def heal(self) -> None:
        self._lab.ip(f"link set {self._port} up")

    @property
    def prefix(self) -> list[str]:
        """What runs a command on the machine."""
        return [*_ENTER, str(self._first), "--net", "--pid", "--mount", "--uts", "--ipc", "--"]

    def run(
        self, *argv: str, env: Mapping[str, str] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the machine to its end; a failure is one of the test unless `check` is false."""
        done = subprocess.run([*self.prefix, *argv], env=env, capture_output=True, text=True)
        assert not check or done.returncode == 0, f"{shlex.join(argv)} on {self.name}: {done.returncode}: {done.stderr}"
        return done

    def is_alive(self, pid: int) -> bool:
        """Whether a process, by its id on the machine, is there and no zombie."""
        return self.is_on and self._state(pid) not in "ZX"

    def pids(self, *words: str) -> list[int]:
        """Processes by their ids on the machine whose command line contains all these words."""
        found = []
        for name in self._listing():
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{self._first}/root/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ")
                if all(word.encode() in line for word in words):
                    found.append(int(name))
        return sorted(found)

    def pid_outside(self, pid: int) -> int | None:
        """The id by which the test knows a process of the machine."""
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError, ValueError):
                    lines = Path(f"/proc/{name}/status").read_text().splitlines()
                    ids = next(line for line in lines if line.startswith("NSpid:")).split()[1:]
                    if len(ids) > 1 and int(ids[-1]) == pid and self._is_of(int(name)):
                        return int(name)
        return None

    def _is_of(self, pid: int) -> bool:
        return os.readlink(f"/proc/{pid}/ns/pid") == os.readlink(f"/proc/{self._first}/ns/pid")

    def kill(self, *pids: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to processes by their ids on the machine."""
        if pids:
            self.run("kill", f"-{number}", *map(str, pids), check=False)

    def _listing(self) -> list[str]:
        with contextlib.suppress(OSError):
            return [name for name in os.listdir(f"/proc/{self._first}/root/proc") if name.isdigit()]
        return []

    def _state(self, pid: int) -> str:
        try:
            return Path(f"/proc/{self._first}/root/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "X"

    def _answers(self) -> bool:
        return f":{PORT:04X} " in Path(f"/proc/{self._first}/net/tcp").read_text() + " "

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        # The kernel ends all others of the machine before its first one is gone.
        _end(process)
        self._first = 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """End `unshare` with its child, for which it waits."""
    for pid in children_of(process.pid) or [process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


_UNSHARE = ["unshare", "--net", "--fork", "--kill-child"]
_ENTER = ["nsenter", "--target"]


class Network:
    """Machines `n1` to `nN` and the switch between them. See `network`."""

    def __init__(self, folder: Path, machines: int = 3) -> None:
        self.folder = folder
        self.hosts = folder / "hosts"
        lines = ["127.0.0.1 localhost", *(f"10.99.0.{number} n{number}" for number in range(1, machines + 1))]
        self.hosts.write_text("\n".join(lines) + "\n")
        client = folder / "client.py"
        client.write_text(_CLIENT.format(port=PORT))
        self.connect = shlex.join([sys.executable, "-IS", str(client)])
        """Followed by a machine and a command, runs the command there, with these streams."""
        self._switch: subprocess.Popen[bytes] | None = None
        self.machines = {f"n{number}": Machine(self, number) for number in range(1, machines + 1)}

    def __getitem__(self, name: str) -> Machine:
        return self.machines[name]

    def start(self) -> None:
        """Raises: LabUnavailable."""
        check_available()
        log = self.folder / "switch.log"
        with open(log, "ab") as errors:
            self._switch = subprocess.Popen(
                [*_UNSHARE, sys.executable, "-IS", "-c", "import os; os.write(1, b'up\\n'); os.read(0, 1)"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        assert self._switch.stdout is not None
        if self._switch.stdout.readline() != b"up\n":
            raise LabUnavailable(f"namespaces cannot be made: {last_line(log)}")
        self.ip("link set lo up")
        self.ip("link add br0 type bridge")
        self.ip("link set br0 up")
        for machine in self.machines.values():
            machine.power_on()

    def ip(self, words: str) -> None:
        """Run `ip` on the switch. Raises: LabUnavailable."""
        assert self._switch is not None
        (first,) = children_of(self._switch.pid)
        done = subprocess.run(
            [*_ENTER, str(first), "--net", "--", "ip", *words.split()], capture_output=True, text=True
        )
        if done.returncode:
            raise LabUnavailable(f"ip {words}: {done.stderr.strip()}")

    def close(self) -> None:
        """End everything on all machines, whatever state they are in."""
        for machine in self.machines.values():
            machine._end()
        if self._switch is not None:
            _end(self._switch)
            self._switch = None


def check_available() -> None:
    """Raises: LabUnavailable, with the reason, as far as can be told without making a machine."""
    if os.geteuid() != 0:
        raise LabUnavailable("machines of namespaces are made by root only")
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if missing:
        raise LabUnavailable(f"machines of namespaces need the commands {', '.join(missing)}")
    trial = ["unshare", "--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "true"]
    done = subprocess.run(trial, capture_output=True, text=True)
    if done.returncode:
        raise LabUnavailable(f"namespaces cannot be made: {done.stderr.strip()}")


def last_line(path: Path) -> str:
    """Of a log, for a sentence."""
    lines = path.read_text(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "no reason given")


@contextlib.contextmanager
def network(folder: Path, machines: int = 3) -> Iterator[Network]:
    """A lab in an empty folder, gone at the end. Raises: LabUnavailable, with the reason."""
    lab = Network(folder, machines)
    try:
        lab.start()
        yield lab
    finally:
        lab.close()


def environment(drop: Sequence[str] = ("GPUSCHED_", "SLURM_", "CUDA_", "GSUB_")) -> dict[str, str]:
    """The environment of these tests, without what a scheduler around them has set."""
    return {key: value for key, value in os.environ.items() if not key.startswith(tuple(drop))}
