"""A machine that is a node of a cluster starts no scheduler of its own, whoever types a command there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpusched import paths
from gpusched.daemon import agent
from gpusched.daemon import main as daemon_main
from gpusched.errors import NotReady

BIN = Path(sys.executable).parent


def typed(home: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    own = {"PATH": f"{BIN}:/usr/bin:/bin", "GPUSCHED_HOME": str(home), "HOME": str(home), **env}
    return subprocess.run([str(BIN / words[0]), *words[1:]], env=own, text=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("words", [("gq",), ("gsub", "--", "true"), ("gpusched", "daemon", "start")])
def test_commands_on_a_node_name_the_machine_to_type_them_on(words: tuple[str, ...], tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / f"node-{os.uname().nodename}").write_text("lab2 10.0.0.5\n")
    found = typed(tmp_path, *words)
    assert found.returncode != 0
    assert found.stdout == ""
    text = "node lab2 of a cluster: the scheduler that books its GPUs runs on the machine at 10.0.0.5"
    assert f"this machine is {text}" in found.stderr
    assert "type the command there: ssh 10.0.0.5" in found.stderr
    assert not (tmp_path / "jobs.db").exists()


def test_the_mark_of_everybodys_cluster_counts_for_every_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSCHED_HOME", str(tmp_path))
    monkeypatch.delenv("GPUSCHED_FAKE_GPUS", raising=False)
    monkeypatch.setattr(paths, "NODE_MARK", str(tmp_path / "mark"))
    daemon_main._stay_off_nodes()
    (tmp_path / "mark").write_text("lab2\n")
    with pytest.raises(NotReady) as caught:
        daemon_main._stay_off_nodes()
    assert caught.value.message.endswith("the scheduler that books its GPUs runs on another machine")
    assert caught.value.hint.endswith(f" if this machine is no longer a node: sudo rm {tmp_path}/mark")
    # Simulated cards are nobody else's.
    monkeypatch.setenv("GPUSCHED_FAKE_GPUS", "2x24GiB")
    daemon_main._stay_off_nodes()


def test_an_agent_marks_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSCHED_HOME", str(tmp_path))
    monkeypatch.delenv("GPUSCHED_FAKE_GPUS", raising=False)
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.5 40000 10.0.0.6 22")
    agent._mark_node("lab2")
    mark = Path(paths.node_mark())
    assert (mark.name, mark.read_text()) == (f"node-{os.uname().nodename}", "lab2 10.0.0.5\n")
    agent._mark_node("lab3")
    with pytest.raises(NotReady, match="node lab3 of a cluster"):
        daemon_main._stay_off_nodes()
    # A home on a file server is that of other machines as well, the head's among them.
    mark.rename(tmp_path / "node-other")
    daemon_main._stay_off_nodes()
