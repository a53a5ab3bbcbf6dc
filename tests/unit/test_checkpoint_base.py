"""How a supervisor makes the checkpoint folder of a job: anew, or of one that nobody needs any more."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from lab import Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon.launch.ticket import RunTickets
from gpusched.engine.supervisor.launch import CheckpointBase
from gpusched.model.execution import Ticket
from gpusched.testing import request


def make(base: Path, spare: str | None) -> Path:
    folder = base / "54"
    env = {"GPUSCHED_CHECKPOINT_DIR": str(folder)}
    ticket = {"checkpoint_dir": str(folder), "spare_checkpoint_dir": spare, "env": env}
    assert CheckpointBase().make_folder(ticket, None) is None
    assert env
    assert folder.stat().st_mode & 0o7777 == 0o700
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    made = tmp_path / "checkpoints"
    made.mkdir(mode=0o700)
    return made


def test_an_empty_folder_is_renamed(base: Path) -> None:
    (base / "45").mkdir(mode=0o700)
    number = (base / "45").stat().st_ino
    folder = make(base, str(base / "45"))
    assert folder.stat().st_ino == number
    assert os.listdir(base) == ["54"]


def _fill(spare: Path) -> None:
    spare.mkdir(mode=0o700)
    (spare / "x").touch()


def _open_it(spare: Path) -> None:
    spare.mkdir()
    spare.chmod(0o755)


def _link(spare: Path) -> None:
    (spare.parent.parent / "other").mkdir(mode=0o700)
    spare.symlink_to(spare.parent.parent / "other")


@pytest.mark.parametrize("prepare", [_fill, _open_it, _link, Path.touch], ids=["not empty", "open", "a link", "a file"])
def test_anything_but_an_empty_folder_of_the_user_alone_stays(base: Path, prepare: Callable[[Path], None]) -> None:
    prepare(base / "45")
    make(base, str(base / "45"))
    assert sorted(os.listdir(base)) == ["45", "54"]


@pytest.mark.parametrize("spare", ["45", "../elsewhere/45"], ids=["gone", "elsewhere"])
def test_without_one_beside_it_a_folder_is_made(base: Path, spare: str) -> None:
    elsewhere = base.parent / "elsewhere" / "45"
    elsewhere.mkdir(parents=True, mode=0o700)
    make(base, os.path.normpath(base / spare))
    assert elsewhere.exists()


def test_a_folder_with_checkpoints_of_an_earlier_run_is_kept(base: Path) -> None:
    (base / "45").mkdir(mode=0o700)
    _fill(base / "54")
    assert (make(base, str(base / "45")) / "x").exists()
    assert (base / "45").exists()


@pytest.mark.parametrize(
    ("whose", "nodes", "given"),
    [(0, 1, ["/c/45", None]), (1, 1, [None, None]), (0, 2, [None, None])],
    ids=["the user's own", "another user's", "a job on two nodes"],
)
def test_only_the_first_run_of_a_job_on_this_machine_alone_is_given_one(
    monkeypatch: pytest.MonkeyPatch, whose: int, nodes: int, given: list[str | None]
) -> None:
    tickets: list[Ticket] = []
    make_ticket = RunTickets.make

    def note(*args: object) -> Ticket:
        tickets.append(make_ticket(*args))  # type: ignore[arg-type]
        return tickets[-1]

    monkeypatch.setattr(RunTickets, "make", note)
    lab = Lab(gpus=0, more_nodes=("n2",) * (nodes - 1), outcome=SimulatedOutcome(runs_s=1, exit_code=1))
    lab.tick()
    submission = lab.submission(request=request(cpus=1.0, nodes=nodes), retry={"retries": 1, "backoff_s": 0.0})
    lab.ticker.tickets.spare_folders.append((submission.caller.uid + whose, "/c/45"))
    lab.ask(submission)
    for _ in range(8):
        lab.tick(1)
    assert [ticket.spare_checkpoint_dir for ticket in tickets[:2]] == given
    assert [ticket.run for ticket in tickets[:2]] == ["1.1", "1.2"]
    assert all(peer.spare_checkpoint_dir is None for ticket in tickets for peer in ticket.peers)
