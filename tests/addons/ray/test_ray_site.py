"""Files of a Ray cluster on a machine, its environment and commands, and what is made of Ray's words."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusched.addons.ray import site
from gpusched.addons.ray.bridge import first_line
from gpusched.addons.ray.keeper import end_leftovers, ray_processes, why_ended
from gpusched.addons.ray.relay import AGENT_VARIABLE
from gpusched.addons.ray.site import (
    RayFolder,
    RayMember,
    check_ray,
    check_token,
    ray_environment,
    raylet_command,
    raylet_environment,
    read_known,
    valid_token,
    without_ray,
    write_known,
)
from gpusched.errors import NotReady
from gpusched.extras import install_command

HEAD = RayMember("head", "lab1", "10.0.0.1", "10.0.0.1")
NODE = RayMember("node", "lab2", "10.0.0.2", "10.0.0.1", 7460, 7560)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayFolder]:
    monkeypatch.setenv("GPUSCHED_HOME", str(tmp_path))
    made = RayFolder(str(tmp_path), "lab1")
    made.make_token()
    yield made
    shutil.rmtree(made.session_root, ignore_errors=True)


def test_what_a_machine_is_survives_a_restart(folder: RayFolder) -> None:
    assert folder.load() is None
    folder.save(NODE)
    assert folder.load() == NODE
    assert (NODE.gcs, NODE.ports) == ("10.0.0.1:7460", range(7560, 7590))


def test_a_token_is_private_and_made_once(folder: RayFolder) -> None:
    first = Path(folder.token).read_text()
    folder.make_token()
    assert Path(folder.token).read_text() == first
    assert os.stat(folder.token).st_mode & 0o777 == 0o600
    assert os.stat(folder.path).st_mode & 0o777 == 0o700
    check_token(folder.token)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_token_that_others_can_read_is_no_token(folder: RayFolder, mode: int) -> None:
    os.chmod(folder.token, mode)
    with pytest.raises(NotReady, match="can be read by others"):
        check_token(folder.token)


@pytest.mark.parametrize("text", ["", " \n", "two words", "a\nb", "gei\xdfel", "x" * 1001, "nul\0"])
def test_other_texts_are_no_tokens(text: str) -> None:
    assert valid_token(text) is None


def test_a_token_may_end_in_a_newline() -> None:
    assert valid_token("0123abc\r\n") == "0123abc"


def test_no_environment_and_no_command_holds_the_token(folder: RayFolder) -> None:
    token = Path(folder.token).read_text()
    for member in (HEAD, NODE):
        env = raylet_environment(folder, member, ["gpusched", "agent", "lab2"], {"RAY_AUTH_TOKEN": "old", "HOME": "/"})
        assert not [value for value in (*env.values(), *raylet_command(folder, member)) if token in value]
        assert env["RAY_AUTH_MODE"] == "token"
        assert env["RAY_AUTH_TOKEN_PATH"] == folder.token
        assert ("RAY_gcs_storage" in env) == member.is_head
        assert "RAY_AUTH_TOKEN" not in env
        # Jobs inherit from the agent, and the agent from a worker of Ray's.
        assert (env["RAY_worker_niceness"], env["RAY_worker_oom_score_adjustment"]) == ("0", "0")


def test_ray_offers_no_resources_and_listens_on_fixed_ports(folder: RayFolder) -> None:
    command = raylet_command(folder, NODE)
    assert {"--num-cpus=0", "--num-gpus=0", "--address=10.0.0.1:7460", "--node-name=lab2", "--block"} <= set(command)
    ports = [int(word.partition("=")[2]) for word in command if "port=" in word]
    assert ports
    assert set(ports) <= set(NODE.ports)
    assert {"--head", "--port=7460", "--include-dashboard=false"} <= set(raylet_command(folder, HEAD))


def test_what_configures_ray_is_not_passed_on(folder: RayFolder) -> None:
    mine = {"RAY_ADDRESS": "ray://elsewhere", AGENT_VARIABLE: "[]", "PATH": "/bin"}
    assert without_ray(mine) == {"PATH": "/bin"}
    assert "RAY_ADDRESS" not in ray_environment(folder, mine)


def test_the_sockets_of_ray_are_closed_to_others_even_if_it_opens_its_folder(folder: RayFolder) -> None:
    session = folder.session()
    above = os.path.dirname(session)
    assert os.stat(above).st_mode & 0o777 == 0o700
    assert len(session) + len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store") <= 107
    assert above == folder.session_root
    os.chmod(above, 0o755)
    with pytest.raises(NotReady, match="is not a private folder of this user"):
        folder.session()


def test_a_look_at_what_runs_leaves_no_folder(folder: RayFolder) -> None:
    assert list(ray_processes(folder)) == []
    assert not os.path.exists(folder.session_root)


def test_only_processes_of_this_folder_are_ended(folder: RayFolder) -> None:
    session = folder.session()
    names = [f"--temp-dir={session}", f"--logs-dir={session}/logs", f"{session}-of-another"]
    started = [subprocess.Popen([sys.executable, "-c", "input()", name], stdin=subprocess.PIPE) for name in names]
    try:
        assert {process.pid for process in ray_processes(folder)} == {one.pid for one in started[:2]}
        end_leftovers(folder)
        assert [one.poll() is None for one in started] == [False, False, True]
    finally:
        for one in started:
            one.kill()
            one.communicate()


@pytest.mark.parametrize(("found", "words"), [(None, "Ray is not installed"), ("2.59.1", "Ray 2.59.1 is installed")])
def test_another_ray_is_refused(monkeypatch: pytest.MonkeyPatch, found: str | None, words: str) -> None:
    def version(name: str) -> str:
        if found is None:
            raise site.metadata.PackageNotFoundError
        return found

    monkeypatch.setattr(site.metadata, "version", version)
    with pytest.raises(NotReady, match=words) as caught:
        check_ray()
    assert caught.value.hint == f"install it: {install_command('ray')}"


def test_known_nodes_are_kept(folder: RayFolder) -> None:
    assert read_known(folder.known) == {}
    write_known(folder.known, {"lab2": "10.0.0.2"})
    assert read_known(folder.known) == {"lab2": "10.0.0.2"}
    for text in ("", "[1]", "{", "\xff"):
        Path(folder.known).write_text(text, encoding="latin-1")
        assert read_known(folder.known) == {}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("", "it said nothing"),
        ("INFO one\n\n two \n", "two"),
        ("x\nRuntimeError: Version mismatch: 2.59\nlast words\n", "RuntimeError: Version mismatch: 2.59"),
        (
            "12:07:05 ERR scripts.py:1307 -- Some Ray subprocesses exited unexpectedly:\n"
            "12:07:05 ERR scripts.py:87 -- raylet [exit code=-9]\n"
            "12:07:05 ERR scripts.py:115 -- ----- BEGIN raylet.err tail (exit code(s)=-9 (signal 9)) -----\n",
            "its raylet ended with -9",
        ),
    ],
)
def test_the_end_of_ray_is_a_sentence(said: str, expected: str) -> None:
    assert why_ended(1, said) == f"Ray ended with 1: {expected}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "ValueError"),
        ("one\ntwo", "ValueError: one"),
        ("failed\nTraceback (most recent call last):\n  File\nOSError: no\n", "ValueError: OSError: no"),
    ],
)
def test_errors_of_ray_are_told_in_a_line(text: str, expected: str) -> None:
    assert first_line(ValueError(text)) == expected
