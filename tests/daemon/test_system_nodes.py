"""A system's daemon with jobs of several users on another node, whose agent runs as root."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from people import ANN, BOB, NEEDS_ROOT, Person, SystemDaemon
from support import wait_until

from gpusched.cli import admin
from gpusched.engine.attach_protocol import HELLO, RUN, VERSION, Wanted, frame, pack_wanted
from gpusched.errors import Forbidden

pytestmark = NEEDS_ROOT

AGENT = (
    sys.executable,
    *("-c", 'import sys; sys.argv[0] = "gpusched"; from gpusched.cli.admin import main; sys.exit(main())', "agent"),
)
CONNECT = """#!/bin/sh
export GPUSCHED_FAKE_GPUS=2x24GiB
exec "$@"
"""


class TwoServers(SystemDaemon):
    """The head, and the node `n2` with files of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.node = Path(tempfile.mkdtemp(prefix="gpusched-node-"))
        self.node.chmod(0o755)
        settings = self.node / "etc" / "gpusched" / "config.toml"
        settings.parent.mkdir(parents=True)
        settings.write_text("[node]\ncpus = 4\n")
        connect = self.node / "connect"
        connect.write_text(CONNECT)
        connect.chmod(0o755)
        words = [str(connect), *AGENT, "--system", "--root", str(self.node), "{node}"]
        command = " ".join(f"'{word}'" for word in words).replace('"', '\\"')
        self.configure(f'[gpu]\nfree_polls = 1\n[cluster]\nnodes = ["n2"]\nconnect = "{command}"\n')

    @property
    def agent_folder(self) -> Path:
        """What the agent keeps."""
        return self.node / "var" / "lib" / "gpusched" / "agent-n2"

    def close(self) -> None:
        super().close()
        wait_until(lambda: not self.agents(), what="the agent to end")
        shutil.rmtree(self.node)

    def agents(self) -> list[str]:
        found = subprocess.run(["pgrep", "-f", f"agent --system --root {self.node}"], capture_output=True, text=True)
        return found.stdout.split()


@pytest.fixture(scope="module")
def servers() -> Iterator[TwoServers]:
    made = TwoServers()
    made.start()
    wait_until(lambda: len(made.call("GET", "/v1/cluster")["gpus"]) == 4, what="the node with its GPUs")
    yield made
    made.close()


def test_a_job_on_another_node_runs_as_its_owner(servers: TwoServers, tmp_path: Path) -> None:
    for user in (ANN, BOB):
        folder = tmp_path / user
        folder.mkdir()
        found = pwd.getpwnam(user)
        os.chown(folder, found.pw_uid, found.pw_gid)
        for parent in folder.parents:
            if parent != Path("/tmp") and parent.stat().st_uid == os.getuid():
                parent.chmod(0o755)
        script = (
            "#!/bin/sh\nid -un; id -Gn; echo $SLURMD_NODENAME\n"
            'echo saved > "$GPUSCHED_CHECKPOINT_DIR/weights" && ls "$GPUSCHED_CHECKPOINT_DIR"\n'
            "ls -d /var/lib/gpusched 2>/dev/null; exit 3\n"
        )
        job = servers.person(user).submit(
            script=script, nodelist=["n2"], gpus=1, work_dir=str(folder), stdout=str(folder / "out")
        )
        (ended,) = servers.wait(job)
        assert (ended["state"], ended["exit_code"], ended["node"]) == ("FAILED", 3, "n2")
        said = (folder / "out").read_text().splitlines()
        assert said[0] == user
        assert said[2:4] == ["n2", "weights"]
        assert (folder / "out").stat().st_uid == found.pw_uid


def test_a_node_is_held_for_the_owner_of_a_batch_job(servers: TwoServers) -> None:
    owner = pwd.getpwnam(ANN).pw_uid
    job = servers.person(ANN).submit("sleep", "600", slurm=True, nodes=2, gpus=2, work_dir="/tmp", stdout="/dev/null")
    servers.pid_of(job)
    for name in (f"{job}.1.checkpoint", f"checkpoints/{job}"):
        here = [path for root in (servers.home, servers.node) for path in root.rglob(name)]
        assert [path.stat().st_uid for path in here] == [owner] * 2, "on both nodes, for what enters"
    servers.person(ANN).call("POST", "/v1/jobs/cancel", {"ids": [job]})
    (ended,) = servers.wait(job)
    assert ended["state"] == "CANCELLED"


def test_every_user_of_a_node_can_see_that_it_is_one(servers: TwoServers) -> None:
    mark = servers.node / "var" / "lib" / "gpusched" / "node"
    seen = subprocess.run(["cat", mark], user=BOB, capture_output=True, text=True)
    assert seen.stdout.split() == ["n2"], seen.stderr


def test_nobody_else_reads_what_the_node_keeps_of_a_run(servers: TwoServers) -> None:
    job = servers.person(ANN).submit("sleep", "600", nodelist=["n2"], env={"SECRET": "x", "PATH": "/usr/bin:/bin"})
    wait_until(lambda: servers.state(job) == "RUNNING", what="it to run")
    spool = servers.agent_folder / "spool"
    wait_until(lambda: list(spool.glob(f"{job}.*")), what="its record")
    record = next(spool.glob(f"{job}.*"))
    folders = [servers.agent_folder / name for name in ("", "spool", "checkpoints")]
    for words in [*(["ls", folder] for folder in folders), ["cat", record]]:
        seen = subprocess.run(words, user=BOB, capture_output=True, text=True)
        assert (seen.stdout, "Permission denied" in seen.stderr) == ("", True)
    servers.person(ANN).call("POST", "/v1/jobs/cancel", {"ids": [job]})
    servers.wait(job)


def test_output_that_is_its_owners_alone_is_read_by_its_owner_alone(servers: TwoServers) -> None:
    folder = Path(tempfile.mkdtemp(prefix="gpusched-ann-", dir="/var/tmp"))
    ann = pwd.getpwnam(ANN)
    os.chown(folder, ann.pw_uid, ann.pw_gid)
    job = servers.person(ANN).submit(
        "echo", "secret", nodelist=["n2"], work_dir=str(folder), stdout=str(folder / "out")
    )
    servers.wait(job)
    there = f"/v1/jobs/{job}/output"
    assert servers.person(ANN).call("GET", there)["text"].endswith("secret\n")
    assert isinstance(servers.person(BOB).refusal("GET", there), Forbidden)
    # With her rights: what she cannot read, she cannot have read either.
    (folder / "out").unlink()
    (folder / "out").symlink_to("/etc/shadow")
    assert "Permission denied" in servers.person(ANN).refusal("GET", there).message
    shutil.rmtree(folder)


ASK = """import os, socket
sock = socket.socket(socket.AF_UNIX)
sock.connect(os.environ["GPUSCHED_SOCKET"])
sock.sendall(b"GET /v1/inside HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n")
answer = b""
while part := sock.recv(65536):
    answer += part
print(answer.decode())
"""


def python_for_all() -> str | None:
    """An interpreter that other users may start."""
    for path in (sys.executable, "/usr/bin/python3"):
        try:
            if subprocess.run([path, "-c", ""], user=ANN, capture_output=True, cwd="/").returncode == 0:
                return path
        except OSError:
            pass
    return None


def test_programs_of_a_job_speak_for_its_owner(servers: TwoServers) -> None:
    python = python_for_all()
    if python is None:
        pytest.skip("other users cannot start Python here")
    job = servers.person(ANN).submit(python, "-c", ASK, nodelist=["n2"], stdout="/tmp/inside-%j")
    (ended,) = servers.wait(job)
    said = servers.person(ANN).call("GET", f"/v1/jobs/{job}/output")["text"]
    Path(f"/tmp/inside-{job}").unlink()
    assert ended["exit_code"] == 0
    assert f'"user":"{ANN}"' in said
    assert f'"id":"{job}"' in said


def test_programs_on_a_node_that_belong_to_no_job_of_their_user_are_refused(servers: TwoServers) -> None:
    job = servers.person(ANN).submit("sleep", "600", nodelist=["n2"])
    servers.wait_state(job, "RUNNING")
    for user in (ANN, BOB):
        person = Person(user, str(servers.agent_folder / "api.sock"))
        refused = person.refusal("GET", "/v1/jobs")
        person.leave()
        assert f"belongs to no running job of {user} there" in refused.message
    servers.person(ANN).call("POST", "/v1/jobs/cancel", {"ids": [job]})
    servers.wait(job)


VISIT = """import socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
lines = f"POST {sys.argv[2]} HTTP/1.1", "Host: x", "Connection: Upgrade", "Upgrade: tcp", "Content-Length: 0"
sock.sendall("\\r\\n".join((*lines, "", "")).encode())
said = b""
while b"\\r\\n\\r\\n" not in said and (part := sock.recv(65536)):
    said += part
answer, _, said = said.partition(b"\\r\\n\\r\\n")
if answer.split()[1] != b"101":
    sys.exit(answer.decode())
sock.sendall(bytes.fromhex(sys.argv[3]))
while b"n2\\n" not in said and (part := sock.recv(65536)):
    said += part
sys.stdout.buffer.write(said)
"""


def test_a_user_enters_an_own_job_as_that_user_and_nobody_else_can(servers: TwoServers) -> None:
    python = python_for_all()
    if python is None:
        pytest.skip("other users cannot start Python here")
    job = servers.person(ANN).submit("sleep", "600", nodelist=["n2"])
    servers.wait_state(job, "RUNNING")
    assert isinstance(servers.person(BOB).refusal("POST", f"/v1/jobs/{job}/enter", {}), Forbidden)
    wanted = Wanted(["sh", "-c", "echo $(id -un) on $SLURMD_NODENAME"], {}, is_terminal=False, umask=0o022, work_dir="")
    said = frame(RUN, pack_wanted(wanted)) + frame(HELLO, b"%d 0 0" % VERSION)

    def visit(user: str, target: str) -> subprocess.CompletedProcess[bytes]:
        words = [python, "-c", VISIT, str(servers.socket), target, said.hex()]
        return subprocess.run(words, user=user, capture_output=True, cwd="/", timeout=60)

    (door,) = servers.person(ANN).call("POST", f"/v1/jobs/{job}/enter", {})["enter"]["doors"]
    assert (door["node"], door["path"]) == ("n2", None)
    target = f"/v1/jobs/{job}/connect?run={door['run']}&node=n2&token={door['token']}"
    assert b" 403 " in visit(BOB, target).stderr
    shown = visit(ANN, target)
    assert f"{ANN} on n2\n".encode() in shown.stdout, shown.stderr
    servers.person(ANN).call("POST", "/v1/jobs/cancel", {"ids": [job]})
    servers.wait(job)


def test_a_daemon_and_an_agent_never_share_the_gpus_of_a_machine(tmp_path: Path) -> None:
    state = tmp_path / "var" / "lib" / "gpusched"
    state.mkdir(parents=True)
    with FileLock(state / "daemon.lock"):
        done = subprocess.run([*AGENT, "--system", "--root", str(tmp_path), "n2"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "this machine's own system daemon schedules its GPUs" in done.stderr
    assert "systemctl disable --now gpusched" in done.stderr


def test_a_machine_that_serves_under_another_name_says_so(tmp_path: Path) -> None:
    state = tmp_path / "var" / "lib" / "gpusched"
    (state / "agent-n2").mkdir(parents=True)
    (state / "node").write_text("n2 10.0.0.1\n")
    words = [*AGENT, "--system", "--root", str(tmp_path), "n3"]
    with FileLock(state / "daemon.lock"):
        with FileLock(state / "agent-n2" / "lock"):
            done = subprocess.run(words, capture_output=True, text=True)
        assert "this machine is node n2 already, under another name" in done.stderr
        assert done.returncode == 1
        # Its agent has ended: the lock is the daemon's own.
        done = subprocess.run(words, capture_output=True, text=True)
        assert "this machine's own system daemon schedules its GPUs" in done.stderr


def test_an_agent_for_all_users_is_started_by_root_alone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["gpusched", "agent", "--system", "n2"])
    assert admin.main() == 1
    assert "hint: sudo gpusched agent --system n2" in capfd.readouterr().err


def test_a_root_is_for_a_system_agent_alone() -> None:
    done = subprocess.run([*AGENT, "--root", "/tmp/x", "n2"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--root /tmp/x is for jobs of all users" in done.stderr
    assert "add --system" in done.stderr
