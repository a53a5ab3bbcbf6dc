"""`gpusched cluster` as typed, with a stand-in for Ray: plans, what they do and undo, and refusals."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from shell import Result, Shell, compare, stopped
from support import claim_ports, wait_until

from gpusched import __version__
from gpusched.access import user_name

GOLDEN = Path(__file__).parent / "golden"
TESTS = Path(__file__).parents[2]
HEAD, NODE = "127.0.0.1", "127.0.0.2"


class Machines:
    """The head `n1` and the node `n2`: two homes on this machine, at two of its addresses."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ports = claim_ports((*range(30), *range(100, 130), *range(200, 230)))
        (root / "nodes.json").write_text("{}")
        self.shells = {}
        (root / "bin").mkdir()
        ssh = root / "bin" / "ssh"
        ssh.write_text("#!/bin/sh\necho 'ssh: connect to host lab1 port 22: Connection refused' >&2\nexit 255\n")
        ssh.chmod(0o755)
        for name in ("n1", "n2", "n3"):
            home = root / name
            home.mkdir(mode=0o700)
            (home / "gpus.json").write_text(json.dumps({"gpus": [{"vram": "24GiB", "uuid": f"GPU-{name}"}]}))
            (home / "config.toml").write_text(f'[node]\nname = "{name}"\ncpus = 4\n[daemon]\npoll_s = 0.1\n')
            (home / "config.toml").chmod(0o640)
            bridge = shlex.join([sys.executable, str(TESTS / "stand_in_bridge.py"), str(root)])
            path = os.pathsep.join([str(TESTS / "fake_ray"), *filter(None, [os.environ.get("PYTHONPATH")])])
            commands = f"{root / 'bin'}:{os.environ['PATH']}"
            own = {
                "PATH": commands,
                "GPUSCHED_FAKE_GPUS": str(home / "gpus.json"),
                "GPUSCHED_RAY_BRIDGE": bridge,
                "PYTHONPATH": path,
            }
            self.shells[name] = Shell(home, home, FAKE_RAY=str(root), **own)

    def type(self, name: str, *words: str, stdin: bytes = b"") -> Result:
        return self.shells[name].type("gpusched", "cluster", *words, stdin=stdin)

    def ok(self, name: str, *words: str, stdin: bytes = b"") -> str:
        done = self.type(name, *words, stdin=stdin)
        assert done.code == 0, (words, done)
        return done.out

    def init(self, *words: str) -> str:
        return self.ok("n1", "init", "--address", HEAD, "--port", str(self.ports), *words)

    def join_words(self, *words: str) -> list[str]:
        return ["join", f"{HEAD}:{self.ports}", "--address", NODE, "--ports", str(self.ports + 100), *words]

    def join(self, *words: str, name: str = "n2") -> str:
        return self.ok(name, *self.join_words("--token-file", "-", "--yes", *words), stdin=self.token())

    def token(self) -> bytes:
        return self.ok("n1", "token").encode()

    def files(self, name: str) -> list[str]:
        folder = self.root / name / "ray"
        return sorted(os.listdir(folder)) if folder.exists() else []

    def shown(self, text: str) -> str:
        """A text without what differs from run to run."""
        text = text.replace(str(self.root), "ROOT").replace(socket.gethostname().partition(".")[0] + ".", "HOST.")
        text = re.sub(r"pid \d+", "pid PID", text.replace(sys.executable, "PYTHON"))
        for offset, name in enumerate(("PORT", "NODEPORT", "OTHERPORT")):
            for number in range(30):
                port = str(self.ports + 100 * offset + number)
                text = text.replace(port, f"{name}+{number}" if number else name)
        text = text.replace(platform.python_version(), "PYVERSION").replace(
            f"gpusched {__version__}", "gpusched VERSION"
        )
        return text.replace(f"as {user_name(os.geteuid())} on", "as USER on")

    def end(self) -> None:
        for name in ("n2", "n3", "n1"):
            if self.files(name):
                self.type(name, "leave", "--yes", "--force")
        stopped(self.shells["n1"])


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path)
    yield made
    made.end()


def test_plans_are_shown_and_do_nothing_and_two_commands_make_a_cluster_and_two_end_it(machines: Machines) -> None:
    before = (machines.root / "n1" / "config.toml").read_text()
    plans = ["$ gpusched cluster init --plan", machines.init("--plan")]
    done = machines.type("n1", "init", "--address", HEAD, "--port", str(machines.ports))
    plans += ["$ gpusched cluster init  # not on a terminal", done.out, done.err]
    assert done.code == 1
    assert machines.files("n1") == []
    assert (machines.root / "n1" / "config.toml").read_text() == before
    made = [machines.init("--yes").partition("done\n")[2]]
    assert (machines.root / "n1" / "ray" / "token").stat().st_mode & 0o777 == 0o600
    assert (machines.root / "n1" / "config.toml").stat().st_mode & 0o777 == 0o640
    token = machines.root / "a-token"
    token.write_bytes(machines.token())
    words = machines.join_words("--plan")
    plans += ["$ gpusched cluster join --plan", machines.ok("n2", *words)]
    plans += ["$ gpusched cluster join --plan --token-file", machines.ok("n2", *words, "--token-file", str(token))]
    assert machines.files("n2") == []
    made.append(machines.join().partition("done\n")[2])
    plans += ["$ gpusched cluster leave --plan  # on a node", machines.ok("n2", "leave", "--plan")]
    plans += ["$ gpusched cluster leave --plan  # on the head", machines.ok("n1", "leave", "--plan")]
    compare("cluster-plans.txt", machines.shown("\n".join(plans)), GOLDEN)
    head = machines.shells["n1"]
    job = head.submit("-w", "n2", "-g", "1", "--", "sh", "-c", "exit 7")
    assert "exit code 7" in head.type("gwait", job).err
    made += [machines.ok(name, command) for command in ("status", "doctor") for name in ("n1", "n2")]
    nodes = json.loads(machines.ok("n1", "status", "--json"))["nodes"]
    assert [(node["name"], node["state"]) for node in nodes] == [("n1", "up"), ("n2", "up")]
    assert all(check["ok"] for check in json.loads(machines.ok("n2", "doctor", "--json"))["checks"])
    made.append(machines.ok("n2", "leave", "--yes").partition("done\n")[2])
    assert machines.files("n2") == []
    made.append(machines.ok("n1", "leave", "n2", "--yes"))
    wait_until(lambda: "n2" not in head.ok("ginfo"), what="n2 to be forgotten")
    machines.ok("n1", "leave", "--yes")
    assert machines.files("n1") == []
    after = (machines.root / "n1" / "config.toml").read_text()
    assert after == before
    compare("cluster-made.txt", machines.shown("\n".join(made)), GOLDEN)


@pytest.mark.nightly
def test_refusals_name_the_next_command(machines: Machines) -> None:
    shown = []

    def refused(name: str, *words: str, note: str = "", stdin: bytes = b"", code: int = 1) -> None:
        done = machines.type(name, *words, stdin=stdin)
        assert done.code == code, (words, done)
        assert "Traceback" not in done.err
        shown.append(f"{name}$ gpusched cluster {' '.join(words)}{note}\n{done.out}{done.err}")

    plain = machines.join_words("--yes")
    for command in ("status", "doctor", "leave", "token", "run"):
        refused("n1", command)
    refused("n2", *plain, note="  # no head")
    refused("n2", "join", "no-such-machine.invalid")
    refused("n2", "join", "lab1:door", code=2)
    refused("n2", "join", HEAD, "--token-file", "nowhere", code=2)
    refused("n2", "join", HEAD, "--token-file", "-", stdin=b"two words", code=2)
    with socket.create_server((HEAD, machines.ports + 7)):
        refused("n1", "init", "--address", HEAD, "--port", str(machines.ports), "--yes", note="  # a port is taken")
    assert machines.files("n1") == []
    machines.init("--yes")
    refused("n1", "init", "--address", HEAD, note="  # again")
    refused("n1", "join", HEAD, note="  # the head")
    wrong = machines.join_words("--yes", "--token-file", "-")
    refused("n2", *wrong, note="  # a wrong token", stdin=b"0123456789abcdef")
    assert machines.files("n2") == []
    (machines.root / "versions").write_text('["2.59.1", "3.11.1"]')
    refused("n2", *wrong, note="  # another Ray", stdin=machines.token())
    (machines.root / "versions").write_text('["2.60.0", "2.7.18"]')
    refused("n2", *wrong, note="  # another Python", stdin=machines.token())
    (machines.root / "versions").unlink()
    assert machines.files("n2") == []
    machines.join()
    refused("n2", *plain, note="  # again")
    refused("n2", "join", "127.0.0.9", note="  # another head")
    refused("n2", "init", note="  # a node")
    refused("n2", "leave", "n3", note="  # not the head")
    refused("n1", "leave", "n3", note="  # no such node", code=2)
    refused("n1", "leave", "n2", "--yes", note="  # it is there")
    others = [word.replace(NODE, "127.0.0.3") for word in wrong]
    others[others.index("--ports") + 1] = str(machines.ports + 200)
    refused("n3", *others, "--name", "n2", note="  # another node's name", stdin=machines.token())
    assert machines.files("n3") == []
    head = machines.shells["n1"]
    job = head.submit("-w", "n2", "--", "sleep", "600")
    wait_until(lambda: "R" in head.ok("gq", "-h", "-o", "%t"), what="a job to run")
    refused("n2", "leave", "--yes", note="  # a job runs")
    refused("n1", "leave", "--yes", note="  # a job runs")
    head.ok("gcancel", job)
    compare("cluster-refusals.txt", machines.shown("\n".join(shown)), GOLDEN)


def test_a_cluster_that_admits_anyone_or_a_raylet_that_does_not_come_up_is_told_of(machines: Machines) -> None:
    machines.init("--yes")
    (machines.root / "open").touch()
    done = machines.type("n1", "doctor")
    assert done.code == 1
    assert f"FAIL strangers: the Ray cluster at {HEAD}:{machines.ports} admits anyone, without a token" in done.out
    (machines.root / "open").unlink()
    os.kill(keeper(machines, "n1"), 9)
    (machines.root / "broken").touch()
    done = machines.type("n1", "doctor")
    assert done.code == 1
    assert "FAIL keeper: nothing keeps Ray running here" in done.out
    machines.ok("n1", "leave", "--yes")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HEAD, machines.ports))


def keeper(machines: Machines, name: str) -> int:
    (path,) = (machines.root / name / "ray").glob("*.pid")
    return int(path.read_text().split()[0])
