"""When the keeper of a raylet starts it again: after its end, and when the head does not know it any more."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpusched.addons.ray import keeper
from gpusched.addons.ray.keeper import RayKeeper, keeper_pid, last_problem
from gpusched.addons.ray.probe import HeadAnswer, ProbedNode
from gpusched.addons.ray.site import RayFolder, RayMember
from gpusched.errors import NotReady

HEAD, NODE = "192.0.2.1", "192.0.2.2"
KNOWN = (ProbedNode("n1", HEAD, True, True), ProbedNode("n2", NODE, True, False))
DEAD = (KNOWN[0], ProbedNode("n2", NODE, False, False))
UNKNOWN = KNOWN[:1]
OTHER = (KNOWN[0], ProbedNode("n2", "192.0.2.9", True, False))
AWAY = None


class Kept:
    """A keeper whose time is its sleeps, whose raylet is a command, and whose head answers from a list."""

    def __init__(self, folder: RayFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.now, self.slept = folder, 1000.0, list[float]()
        self.starts, self.asked = 0, 0
        self.is_slow = True
        """Its raylet lasts; otherwise no time passes while one runs."""
        self.raylet = ["sleep", "1000"]
        self.answers: list[tuple[ProbedNode, ...] | None] = []
        self.ends = lambda: False
        self.on_sleep: Callable[[], None] = lambda: None
        folder.make_token()
        monkeypatch.setattr(keeper, "check_ray", lambda: None)
        monkeypatch.setattr(keeper, "check_admission", lambda *_: None)
        monkeypatch.setattr(keeper, "raylet_command", self._command)
        monkeypatch.setattr(keeper, "ask_head", self._ask)
        monkeypatch.setattr(keeper, "time", SimpleNamespace(sleep=self._sleep, monotonic=lambda: self.now))

    def run(self, role: str = "node") -> None:
        """Until `ends` says so; a TERM would do the same."""
        member = RayMember(role, "n1" if role == "head" else "n2", HEAD if role == "head" else NODE, HEAD)
        with pytest.raises(SystemExit):
            RayKeeper(self.folder, member, ["agent"]).run()

    def _command(self, *_: object) -> list[str]:
        self.starts += 1
        return self.raylet

    def _ask(self, *_: object) -> HeadAnswer:
        answer = self.answers[self.asked] if self.asked < len(self.answers) else KNOWN
        self.asked += 1
        if answer is AWAY:
            raise NotReady("the head cannot be reached", "")
        return HeadAnswer("2.60.0", "3.11", answer)

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if seconds < keeper.FIRST_WAIT_S and not self.is_slow:
            time.sleep(0.005)
        else:
            self.now += seconds
        self.on_sleep()
        if self.ends():
            raise SystemExit(0)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    return Kept(RayFolder(str(tmp_path), "n2"), monkeypatch)


@pytest.mark.parametrize(
    ("answers", "starts"),
    [
        ([KNOWN, KNOWN, KNOWN], 1),
        ([UNKNOWN, UNKNOWN], 2),
        ([DEAD, DEAD], 2),
        # Another machine has its name: this one is outside, and is told so when it asks to be admitted again.
        ([OTHER, OTHER], 2),
        ([UNKNOWN, KNOWN, UNKNOWN, KNOWN, UNKNOWN], 1),
        # A head that is away knows nobody; the raylet waits for its return.
        ([AWAY, AWAY, AWAY, AWAY], 1),
        ([UNKNOWN, AWAY, UNKNOWN, KNOWN], 1),
        ([AWAY, UNKNOWN, UNKNOWN], 2),
        # A raylet that was started again is not judged by what was said of the one before.
        ([UNKNOWN, UNKNOWN, UNKNOWN, KNOWN], 2),
        ([UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN], 3),
    ],
)
def test_a_raylet_unknown_to_its_head_twice_in_a_row_is_started_again(
    kept: Kept, answers: list[tuple[ProbedNode, ...] | None], starts: int
) -> None:
    kept.answers = answers
    kept.ends = lambda: kept.asked > len(answers)
    kept.run()
    assert kept.starts == starts
    problem = last_problem(kept.folder)
    assert problem == (None if starts == 1 else f"the head {HEAD}:7460 no longer knew this node; it joins again")


def test_the_head_is_asked_once_a_minute_by_nodes_and_never_by_itself(kept: Kept) -> None:
    kept.ends = lambda: kept.now > 1600
    kept.run()
    assert kept.asked == 10
    kept.now, kept.asked = 1000.0, 0
    kept.run("head")
    assert (kept.asked, kept.starts) == (0, 2)


def test_raylets_that_end_are_started_again_ever_later(kept: Kept) -> None:
    kept.raylet = ["sh", "-c", "echo 'RuntimeError: no room'; exit 3"]
    kept.is_slow = False
    waits: list[float] = []

    def note() -> None:
        if last_problem(kept.folder) is not None and kept.slept[-1] >= 1.0:
            waits.append(kept.slept[-1])

    kept.on_sleep, kept.ends = note, lambda: len(waits) == 7
    kept.run()
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert last_problem(kept.folder) == "Ray ended with 3: RuntimeError: no room"


def test_a_head_that_refuses_a_node_is_asked_again_and_nothing_is_started(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise NotReady("another machine is already node n2", "join under another name")

    monkeypatch.setattr(keeper, "check_admission", refuse)
    kept.ends = lambda: len(kept.slept) == 4
    kept.run()
    assert (kept.starts, kept.slept) == (0, [1.0, 2.0, 4.0, 8.0])
    assert last_problem(kept.folder) == "another machine is already node n2; join under another name"


def test_nothing_is_left_of_a_keeper_that_ends(kept: Kept) -> None:
    pids: list[int | None] = []
    kept.on_sleep = lambda: pids.append(keeper_pid(kept.folder))
    kept.ends = lambda: len(pids) == 3
    kept.run()
    assert None not in pids
    assert keeper_pid(kept.folder) is None
