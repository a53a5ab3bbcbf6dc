"""Command lines of container runtimes, words of submissions about containers, names of GPUs, who can run rootless."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpusched.engine.container import (
    ContainerRun,
    container_name,
    environment_file,
    inside,
    outside,
    pull_command,
    remove_command,
    run_command,
    run_of,
)
from gpusched.engine.linux import cdi, rootless
from gpusched.model.container import (
    APPTAINER,
    PODMAN,
    Bind,
    is_allowed,
    is_pinned,
    read_bind,
    why_no_image,
    why_not_mounted,
)

DIGEST = "sha256:" + "a" * 64
IMAGE = f"docker.io/library/alpine@{DIGEST}"


def made(**changes: object) -> ContainerRun:
    given = {
        "program": "/usr/bin/podman",
        "name": "gpusched-42.1-abcdef",
        "image": IMAGE,
        "argv": ["python", "train.py"],
        "work_dir": "/home/ann/p",
        "binds": [Bind("/home/ann/p", "/home/ann/p")],
        "env_file": "/spool/42.1.env",
        "label": "/spool",
    }
    return ContainerRun(**{**given, **changes})  # type: ignore[arg-type]


PODMAN_CASES = {
    "a CPU job": ({}, [], ["--device=", "--interactive", "--tty"]),
    "GPUs by name": (
        {"devices": ["nvidia.com/gpu=GPU-1", "nvidia.com/gpu=0"]},
        ["--device=nvidia.com/gpu=GPU-1", "--device=nvidia.com/gpu=0"],
        [],
    ),
    "a mount to read": ({"binds": [Bind("/data", "/d", True)]}, ["--volume=/data:/d:ro"], []),
    "variables of several lines": ({"env_names": ["M"]}, ["--env=M"], []),
    "input": ({"has_input": True}, ["--interactive", "--log-driver=passthrough"], ["--tty"]),
    "pipes of a client": ({"has_streams": True}, ["--interactive", "--log-driver=passthrough"], ["--tty"]),
    "a terminal": (
        {"has_terminal": True, "has_streams": True},
        ["--interactive", "--tty", "--log-driver=none"],
        ["--log-driver=passthrough"],
    ),
    "a user": ({}, ["--userns=keep-id"], []),
    "root": ({"is_root": True}, [], ["--userns=keep-id"]),
    "a umask": ({"umask": 0o027}, ["--umask=0027"], []),
}


@pytest.mark.parametrize("case", PODMAN_CASES)
def test_podman_is_called_with_what_the_run_has_and_nothing_more(case: str) -> None:
    changes, there, absent = PODMAN_CASES[case]
    command = run_command(PODMAN, made(**changes))
    always = ["--cgroups=disabled", "--rm", "--init", "--pull=never", "--network=host", "--workdir=/home/ann/p"]
    for word in [*always, "--name=gpusched-42.1-abcdef", "--env-file=/spool/42.1.env", "--entrypoint=", *there]:
        assert word in command, word
    for word in [*absent, "--privileged", "--pid"]:
        assert not [one for one in command if one.startswith(word)], word
    assert command[:3] == ["/usr/bin/podman", "--cgroup-manager=cgroupfs", "run"]
    assert command[-3:] == [IMAGE, "python", "train.py"]


def test_a_command_that_looks_like_options_stays_behind_the_image() -> None:
    for runtime in (PODMAN, APPTAINER):
        assert run_command(runtime, made(argv=["--privileged", "-v/:/"]))[-3:] == [IMAGE, "--privileged", "-v/:/"]


def test_apptainer_gets_the_drivers_files_only_with_a_gpu() -> None:
    found = run_command(APPTAINER, made(program="/usr/bin/apptainer", image="/c/x.sif"))
    assert found == [
        *("/usr/bin/apptainer", "--quiet", "exec", "--contain", "--cleanenv", "--env-file=/spool/42.1.env"),
        *("--bind=/dev/shm:/dev/shm", "--bind=/home/ann/p:/home/ann/p", "--pwd=/home/ann/p"),
        *("/c/x.sif", "python", "train.py"),
    ]
    assert "--nv" in run_command(APPTAINER, made(has_gpus=True))


def test_names_tell_runs_and_daemons_apart() -> None:
    first, other = container_name("42.1", "/a/spool"), container_name("42.1", "/b/spool")
    assert first != other
    assert first.startswith("gpusched-42.1-")
    assert (run_of(first, "/a/spool"), run_of(other, "/a/spool")) == ("42.1", None)
    rank = container_name("42.1", "/a/spool", 12)
    assert rank.startswith("gpusched-42.1.12-")
    assert run_of(rank, "/a/spool") == "42.1"
    assert remove_command(PODMAN, "podman", [first, rank]) == [
        *("podman", "--cgroup-manager=cgroupfs", "rm", "--force", "--ignore", "--time=0", first, rank)
    ]
    assert remove_command(APPTAINER, "apptainer", [first]) is None


def test_an_image_is_never_part_of_a_shell_line() -> None:
    for runtime in (PODMAN, APPTAINER):
        *_, text, name, program, image, pinned = pull_command(runtime, "/usr/bin/x", "docker.io/a$(id)")
        assert (name, program, image, pinned) == ("gpusched-pull", "/usr/bin/x", "docker.io/a$(id)", "")
        assert "docker.io" not in text


def test_the_environment_file_keeps_every_value() -> None:
    env = {"A": "1 2", "Q": "it's", "M": "one\ntwo", "E": ""}
    assert environment_file(PODMAN, env) == ("A=1 2\nQ=it's\nE=\n", ["M"])
    text, names = environment_file(APPTAINER, env)
    assert (text, names) == ("A='1 2'\nQ='it'\"'\"'s'\nM='one\ntwo'\nE=''\n", [])


def test_variables_about_files_of_the_host_stay_outside() -> None:
    env = {"PATH": "/me/bin", "LD_PRELOAD": "/x.so", "HOME": "/home/ann", "A": "1", "BASH_FUNC_f%%": "() { :; }"}
    assert inside(env) == {"A": "1", "NVIDIA_VISIBLE_DEVICES": "void"}
    found = outside({**env, "CONTAINER_HOST": "ssh://other", "DOCKER_HOST": "tcp://other"})
    assert "LD_PRELOAD" not in found
    assert "CONTAINER_HOST" not in found
    assert "DOCKER_HOST" not in found
    assert found["PATH"] == "/me/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"


@pytest.mark.parametrize(
    "image",
    [
        "alpine",
        "alpine:3.20",
        "docker.io/library/alpine:3",
        "localhost/mine:1",
        "reg.lab.org:5000/a/b",
        IMAGE,
        "/d/x.sif",
    ],
)
def test_image_references(image: str) -> None:
    assert why_no_image(image) is None


@pytest.mark.parametrize(
    "image",
    [
        "",
        "-v",
        "--privileged",
        "a b",
        "a;b",
        "a//b",
        "alpine@sha256:12",
        "alpine:",
        "a/",
        "x.sif",
        "/a:b.sif",
        "ä",
        "a\nb",
    ],
)
def test_texts_that_name_no_image(image: str) -> None:
    assert why_no_image(image) is not None


def test_a_pull_may_say_only_what_names_one_image() -> None:
    assert is_pinned(IMAGE)
    assert is_pinned(DIGEST)
    assert is_pinned("/c/x.sif")
    for said in ("alpine:3", "", "--privileged", "it failed", f"a b@{DIGEST}"):
        assert not is_pinned(said)


def test_allowed_places_end_at_a_border() -> None:
    rules = ("nvcr.io/nvidia", "docker.io/library/alpine", "/data/images")
    for image in ("nvcr.io/nvidia/pytorch:24", "docker.io/library/alpine:3", f"docker.io/library/alpine@{DIGEST}"):
        assert is_allowed(image, rules)
    for image in ("nvcr.io/nvidia-evil/x", "alpine", "docker.io/library/alpine-x", "/data/images/../x.sif"):
        assert not is_allowed(image, rules)
    assert is_allowed("/data/images/x.sif", rules)
    assert is_allowed("anything", ())


def test_binds_are_read_and_normalised() -> None:
    bind = read_bind("/data/../data/set:/d:ro")
    assert (bind.source, bind.target, bind.is_read_only) == ("/data/set", "/d", True)
    assert read_bind("/data").target == "/data"
    for text in ("data:/d", "/data:d", "/data:/d:rx", "/data:/", "/a,b:/d", "/a:/b\n", ""):
        with pytest.raises(ValueError):
            read_bind(text)


@pytest.mark.parametrize(
    "source", ["/", "/dev", "/dev/sda", "/run", "/var/run/docker.sock", "/proc", "/sys/fs", "/x/docker.sock"]
)
def test_devices_and_sockets_of_daemons_are_not_mounted(source: str) -> None:
    assert why_not_mounted(source) is not None


def test_folders_of_users_are_mounted() -> None:
    for source in ("/home/ann", "/data", "/devices", "/running", "/srv/dev"):
        assert why_not_mounted(source) is None


# --- names of GPUs -------------------------------------------------------------------------------------------

YAML = """---
cdiVersion: 0.6.0
containerEdits:
  deviceNodes:
  - path: /dev/nvidiactl
  env:
  - NVIDIA_VISIBLE_DEVICES=void
  hooks:
  - args:
    - nvidia-cdi-hook
    - --link
    - ../libnvidia.so.1::/usr/lib/x
    hookName: createContainer
    path: /usr/bin/nvidia-cdi-hook
devices:
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
    - path: /dev/dri/card0
  name: "0"
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia3
      permissions: rw
  name: '1'
- name: GPU-b
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia3
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
    - path: /dev/nvidia-caps/nvidia-cap12
  name: MIG-1
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
    - path: /dev/nvidia3
  name: all
kind: nvidia.com/gpu
"""
JSON = """{"kind": "nvidia.com/gpu",
"devices": [{"name": "7", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia7"}]}}]}"""


def test_a_gpu_is_the_device_with_its_node_alone() -> None:
    devices = cdi.devices_of(YAML)
    found = cdi.names_for([("GPU-a", 0), ("GPU-b", 3), ("GPU-c", 3), ("MIG-1", None)], devices)
    assert found == ["nvidia.com/gpu=0", "nvidia.com/gpu=GPU-b", "nvidia.com/gpu=1", "nvidia.com/gpu=MIG-1"]
    assert cdi.names_for([("GPU-x", 7)], cdi.devices_of(JSON)) == ["nvidia.com/gpu=7"]


@pytest.mark.parametrize("gpu", [("GPU-b", 0), ("GPU-z", 5), ("MIG-2", None)])
def test_a_specification_that_lends_another_card_is_stale(gpu: tuple[str, int | None]) -> None:
    with pytest.raises(cdi.CdiError, match="stale.*nvidia-ctk cdi generate"):
        cdi.names_for([gpu], cdi.devices_of(YAML))


def test_without_a_specification_the_command_that_makes_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(cdi.CdiError, match="nvidia-ctk cdi generate"):
        cdi.names_for([("GPU-a", 0)], cdi.read_devices([str(tmp_path), "/nowhere"]))


def test_specifications_are_read_from_files_and_others_left_out(tmp_path: Path) -> None:
    (tmp_path / "nvidia.yaml").write_text(YAML)
    (tmp_path / "other.json").write_text('{"kind": "intel.com/gpu", "devices": [{"name": "9"}]}')
    (tmp_path / "notes.txt").write_text("no")
    assert [device.name for device in cdi.read_devices([str(tmp_path)])] == ["0", "1", "GPU-b", "MIG-1", "all"]
    (tmp_path / "bad.yaml").write_text("devices: [a, b]\n")
    with pytest.raises(cdi.CdiError, match=r"bad\.yaml cannot be understood"):
        cdi.read_devices([str(tmp_path)])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a: 1\nb:\n  c: x # y\n", {"a": "1", "b": {"c": "x"}}),
        ("a:\n- 1\n- b: 2\n  c: 3\n-\n  d: 4\n", {"a": ["1", {"b": "2", "c": "3"}, {"d": "4"}]}),
        ("a:\nb: ''\n", {"a": None, "b": ""}),
        ("- a=b\n- --x\n- c::d\n", ["a=b", "--x", "c::d"]),
        ("a: []\nb: {}\n", {"a": [], "b": {}}),
        ("", None),
    ],
)
def test_yaml_in_block_style(text: str, found: object) -> None:
    assert cdi.read_yaml(text) == found


@pytest.mark.parametrize("text", ["a: [1]\n", "a: |\n  x\n", "\ta: 1\n", "a: 1\n   b: 2\n", 'a: "x\\n"\n', "a: &x 1\n"])
def test_other_yaml_is_refused_rather_than_misread(text: str) -> None:
    with pytest.raises(ValueError):
        cdi.read_yaml(text)


# --- rootless ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "is_there"),
    [
        ("ann:100000:65536\n", True),
        ("1000:100000:65536\n", True),
        ("bob:1:2\n", False),
        ("ann:x:y\n", False),
        ("", False),
    ],
)
def test_ranges_of_subordinate_ids(tmp_path: Path, lines: str, is_there: bool) -> None:
    path = tmp_path / "subuid"
    path.write_text(lines)
    assert rootless.has_range(str(path), "ann", 1000) is is_there


def test_what_podman_lacks_is_named_with_the_command_that_mends_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rootless.cgroup, "MOUNT", str(tmp_path))
    monkeypatch.setattr(rootless, "find_program", lambda name: None)
    found = rootless.why_not_podman("ann", 1000)
    assert found is not None
    assert "newuidmap" in found[0]
    assert "uidmap" in found[1]
    monkeypatch.setattr(rootless, "find_program", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(rootless, "SUBORDINATE", (str(tmp_path / "subuid"),))
    found = rootless.why_not_podman("ann", 1000)
    assert found is not None
    assert "ann has no range" in found[0]
    assert "usermod --add-subuids" in found[1]
    assert rootless.why_not_podman("root", 0) is None
    (tmp_path / "unified").mkdir()
    (tmp_path / "unified" / "cgroup.controllers").touch()
    found = rootless.why_not_podman("root", 0)
    assert found is not None
    assert "mounts both" in found[0]
