"""The daemon's side of the bridge to Ray: what it makes of what a bridge says, and when it starts another one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import wait_until

from gpusched.addons.ray import link
from gpusched.addons.ray.link import FIRST_DOUBT_S, LONGEST_DOUBT_S, RayBridge
from gpusched.engine.remote import channel

# Knows n2 and n3. A file of the name of a node says what becomes of a stream to it.
BRIDGE = """
import json, os, select, socket, sys
from pathlib import Path
root, control = Path(sys.argv[1]), socket.socket(fileno=os.dup(0))
def tell(message):
    control.send(json.dumps(message).encode())
while True:
    tell({"nodes": [["n2", "192.0.2.2", "a"], ["n3", "192.0.2.3", "b"]]})
    while select.select([control], [], [], 0.05)[0]:
        data, fds, _, _ = socket.recv_fds(control, 1 << 16, 1)
        if not data:
            sys.exit(0)
        name = json.loads(data)["open"]
        fate = (root / name).read_text()
        if fate != "unreached":
            tell({"opened": name})
        if fate != "open":
            tell({"closed": name, "why": fate})
            os.close(fds[0])
"""


class Linked:
    """A bridge whose time is set."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.now = root, 1000.0
        (root / "bridge.py").write_text(BRIDGE)
        for name in ("n2", "n3"):
            self.set(name, "open")
        for module in (link, channel):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.bridge = RayBridge([sys.executable, "-IS", str(root / "bridge.py"), str(root)], silence_s=1e9)
        self.until(lambda: len(self.bridge.nodes) == 2)

    def set(self, name: str, fate: str) -> None:
        (self.root / name).write_text(fate)

    def until(self, predicate: Callable[[], object]) -> None:
        def polled() -> object:
            self.bridge.poll()
            return predicate()

        wait_until(polled, what="the bridge")

    def connect(self, name: str) -> None:
        """Ask for a stream, and hear what became of it."""
        stream = self.bridge.connect(name)
        assert stream is not None
        fate = (self.root / name).read_text()
        self.until(lambda: fate == "open" or self.bridge.why_closed(name) == fate)
        # What the bridge says next shows that it has said all of it.
        before = self.bridge.nodes
        self.until(lambda: self.bridge.nodes is not before)
        stream.close()

    def replaced_after(self, name: str, seconds: float) -> bool:
        """Whether another bridge is started while a node is tried for a time, every few seconds of it."""
        before = self.bridge.pid
        until = self.now + seconds
        while self.now < until and self.bridge.pid == before:
            self.now += 4.0
            self.bridge.poll()
            if self.bridge.pid == before:
                self.connect(name)
        if self.bridge.pid == before:
            return False
        self.now += 1.0
        self.until(lambda: self.bridge.trouble is None)
        return True


@pytest.fixture
def linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Linked]:
    made = Linked(tmp_path, monkeypatch)
    yield made
    made.bridge.close()


def test_a_bridge_that_does_not_reach_a_node_which_ray_has_is_replaced_ever_more_rarely(linked: Linked) -> None:
    linked.set("n2", "unreached")
    linked.connect("n2")
    assert linked.replaced_after("n2", FIRST_DOUBT_S + 4)
    linked.connect("n2")
    assert not linked.replaced_after("n2", FIRST_DOUBT_S + 4)
    assert linked.replaced_after("n2", FIRST_DOUBT_S + 4)
    for _ in range(8):
        linked.connect("n2")
        linked.now += LONGEST_DOUBT_S + 1
        before = linked.bridge.pid
        linked.until(lambda before=before: linked.bridge.pid not in (None, before) and linked.bridge.trouble is None)
    linked.connect("n2")
    linked.now += LONGEST_DOUBT_S - 1
    before = linked.bridge.pid
    linked.bridge.poll()
    assert linked.bridge.pid == before
    # Once it is reached, the next time counts as the first.
    linked.set("n2", "open")
    linked.connect("n2")
    linked.set("n2", "unreached")
    linked.connect("n2")
    assert linked.replaced_after("n2", FIRST_DOUBT_S + 4)


@pytest.mark.parametrize("fate", ["open", "the agent ended with 1: no such command"])
def test_a_bridge_that_reaches_its_nodes_is_kept_whatever_their_agents_do(linked: Linked, fate: str) -> None:
    linked.set("n2", fate)
    linked.connect("n2")
    assert not linked.replaced_after("n2", 5 * FIRST_DOUBT_S)


def test_a_node_that_is_reached_now_and_then_keeps_its_bridge(linked: Linked) -> None:
    before = linked.bridge.pid
    for _ in range(4):
        linked.set("n3", "unreached")
        linked.connect("n3")
        linked.now += FIRST_DOUBT_S - 1
        linked.set("n3", "open")
        linked.connect("n3")
        linked.now += 2
        linked.bridge.poll()
    assert linked.bridge.pid == before


def test_a_bridge_that_ends_is_started_again_and_says_why(linked: Linked) -> None:
    before = linked.bridge.pid
    assert before is not None
    os.kill(before, 9)
    linked.until(lambda: linked.bridge.trouble is not None or linked.bridge.pid != before)
    linked.now += 60.0
    linked.until(lambda: linked.bridge.pid not in (None, before) and linked.bridge.trouble is None)
    assert set(linked.bridge.nodes) == {"n2", "n3"}


@pytest.mark.parametrize(
    ("ends", "fresh_s", "why"),
    [
        ("exit 3", 60.0, "the bridge to Ray ended with 3: a warning"),
        ("exit 3", -1.0, "the bridge to Ray ended with 3"),
        ("kill -9 $$", 60.0, "the bridge to Ray ended with -9"),
    ],
    ids=["just before", "long before", "killed"],
)
def test_only_what_a_bridge_wrote_just_before_its_end_is_why(
    monkeypatch: pytest.MonkeyPatch, ends: str, fresh_s: float, why: str
) -> None:
    monkeypatch.setattr(link, "_FRESH_S", fresh_s)
    bridge = RayBridge(["sh", "-c", f"echo a warning >&2; {ends}"])
    try:

        def has_ended() -> bool:
            bridge.poll()
            return "ended with" in (bridge.trouble or "")

        wait_until(has_ended, what="the end of the bridge")
        assert bridge.trouble == why
    finally:
        bridge.close()
