"""What `gpusched cluster` does for all users of a machine, with systemd, and how it finds addresses and ports."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpusched.addons.ray import cluster_plan
from gpusched.addons.ray.cluster_plan import (
    ClusterPlace,
    agent_command,
    change_engine,
    check_ports,
    keep_running,
    own_address,
    stop_running,
    with_engine,
)
from gpusched.addons.ray.site import RayFolder, RayMember
from gpusched.addons.system.system_plan import InstallTarget, source, unit_text
from gpusched.errors import NotReady, Refused, UsageError

HEAD = RayMember("head", "lab1", "10.0.0.1", "10.0.0.1")
NODE = RayMember("node", "lab2", "10.0.0.2", "10.0.0.1")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterPlace:
    monkeypatch.setattr(cluster_plan, "commands_folder", lambda: "/srv/gpusched/bin")
    monkeypatch.setattr(cluster_plan, "UNITS", str(tmp_path / "units"))
    monkeypatch.setattr(cluster_plan, "node_plan", lambda site: [])
    return ClusterPlace(RayFolder(str(tmp_path), "lab1"), True, str(tmp_path / "config.toml"))


@pytest.mark.parametrize(("member", "unit"), [(HEAD, "gpusched-head.service"), (NODE, "gpusched-node.service")])
def test_systemd_keeps_ray_running_and_is_told_so_once(place: ClusterPlace, member: RayMember, unit: str) -> None:
    steps = list(keep_running(place, member))
    path = f"{cluster_plan.UNITS}/{unit}"
    assert [(step.word, step.target) for step in steps] == [
        ("write", path),
        ("run", "systemctl daemon-reload"),
        ("run", f"systemctl enable --quiet --now {unit}"),
    ]
    assert list(stop_running(place, member)) == []
    assert steps[0].act is not None
    steps[0].act()
    assert "ExecStart=/srv/gpusched/bin/gpusched cluster run\n" in Path(path).read_text()
    assert [step.word for step in keep_running(place, member)] == ["run", "run"]
    assert [(step.word, step.target) for step in stop_running(place, member)] == [
        ("run", f"systemctl disable --quiet --now {unit}"),
        ("remove", path),
        ("run", "systemctl daemon-reload"),
    ]


@pytest.mark.parametrize("unit", ["gpusched-head.service", "gpusched-node.service"])
def test_a_stopped_unit_ends_no_job(unit: str) -> None:
    text = unit_text(unit, InstallTarget("/opt/gpusched/bin"))
    assert text == source(unit)
    assert {"KillMode=process", "Restart=always", "UMask=0077"} <= set(text.splitlines())


def test_an_agent_for_all_users_is_started_as_one(place: ClusterPlace) -> None:
    assert agent_command(place, NODE) == [
        *("/srv/gpusched/bin/gpusched", "agent", "lab2", "--address", "10.0.0.2", "--system"),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[cluster\n", "is written in a form that this command cannot change"),
        (b"# \xff\n", "cannot be read as text"),
    ],
)
def test_settings_that_cannot_be_changed_safely_are_left_alone(
    place: ClusterPlace, text: str | bytes, words: str
) -> None:
    Path(place.config).write_bytes(text if isinstance(text, bytes) else text.encode())
    before = Path(place.config).read_bytes()
    with pytest.raises(Refused, match=words):
        list(change_engine(place, "ray"))
    assert Path(place.config).read_bytes() == before


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ('cluster = {nodes = ["lab2"]}\n', 'cluster = {nodes = ["lab2"], engine = "ray"}\n'),
        ('cluster.engine = "command"\n', 'cluster.engine = "ray"\n'),
    ],
)
def test_settings_in_another_form_keep_it(text: str, changed: str) -> None:
    assert with_engine(text, "ray") == changed


def test_settings_behind_a_link_are_left_alone(place: ClusterPlace, tmp_path: Path) -> None:
    (tmp_path / "real.toml").write_text("")
    Path(place.config).symlink_to(tmp_path / "real.toml")
    with pytest.raises(Refused, match="is a link"):
        list(change_engine(place, "ray"))


def cards(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    found = [SimpleNamespace(family=socket.AF_INET, address=address) for address in addresses]
    monkeypatch.setattr(cluster_plan.psutil, "net_if_addrs", lambda: {"cards": found})


def test_the_only_address_is_that_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch, "127.0.0.1", "10.0.0.5")
    assert own_address("127.0.0.1") == "10.0.0.5"


@pytest.mark.parametrize(
    ("addresses", "words"),
    [(("10.0.0.5", "10.1.0.5"), "it has 10.0.0.5, 10.1.0.5"), ((), "it has only its own")],
)
def test_of_several_addresses_one_must_be_named(
    monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...], words: str
) -> None:
    cards(monkeypatch, *addresses)
    with pytest.raises(UsageError, match=words) as caught:
        own_address("127.0.0.1")
    assert caught.value.hint == "name it: --address IP"


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        member = RayMember("head", "lab1", "10.0.0.1", "10.0.0.1", port, port)
        with pytest.raises(NotReady, match=f"port {port} cannot be used: Address already in use") as caught:
            check_ports(member, "--port")
        assert caught.value.hint == f"choose others: --port {port + 100}"


@pytest.mark.parametrize(
    "text",
    ["", '[node]\nname = "a"\n', '[node]\nname = "a"', '# ours\n[cluster]\nnodes = ["b"]\n', "[cluster]\n# mine\n"],
)
def test_what_was_set_goes_without_a_trace(text: str) -> None:
    assert with_engine(with_engine(text, "ray"), None) == text
