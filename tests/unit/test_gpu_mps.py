"""MPS: where a control daemon counts as there, what a run is started with, and whose memory a server's is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from gpu_builders import UUID, reading, sample, slices

from gpusched.daemon.launch.environment import job_environment
from gpusched.daemon.launch.limits import with_limit
from gpusched.gpu.mps import MPS_PID_FILE, WithMps, is_mps_running
from gpusched.gpu.simulated import SimulatedSource, simulated_uuid
from gpusched.gpu.tracker import CLEAN, GpuTracker
from gpusched.gpu.usage import enforcement
from gpusched.model.cluster import GpuProcess, GpuSample
from gpusched.model.execution import LaunchSite
from gpusched.model.job import GpuShare, Request, Run
from gpusched.model.settings import GpuSettings, Settings
from gpusched.model.snapshot import Placement
from gpusched.model.states import RunState
from gpusched.model.value import replace
from gpusched.testing import job

WITH = Settings(gpu=GpuSettings(mps_dir="/run/mps", vram_over="kill"))
SERVER = "nvidia-cuda-mps"


# --- whether it is there --------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a control daemon with pid 7, and what /proc says of that."""
    (tmp_path / MPS_PID_FILE).write_text("7\n")
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "7" / "comm").write_text(SERVER + "\n")
    return tmp_path


def there(folder: Path) -> bool:
    return is_mps_running(str(folder), str(folder / "proc"))


def test_a_live_daemon_is_found(folder: Path) -> None:
    assert there(folder)


@pytest.mark.parametrize("text", ["", "x", "-7", "8", "7 7", "7" * 40])
def test_a_file_without_a_live_process_is_ignored(folder: Path, text: str) -> None:
    (folder / MPS_PID_FILE).write_text(text)
    assert not there(folder)


def test_a_reused_pid_is_ignored(folder: Path) -> None:
    (folder / "proc" / "7" / "comm").write_text("bash\n")
    assert not there(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a folder to somebody else")
def test_a_folder_of_another_user_is_ignored(folder: Path) -> None:
    os.chown(folder, 65534, -1)
    assert not there(folder)


@pytest.mark.parametrize(("mode", "counts"), [(0o755, True), (0o1777, True), (0o775, False), (0o777, False)])
def test_a_folder_writable_by_others_is_ignored(folder: Path, mode: int, counts: bool) -> None:
    inside = folder / "card"
    inside.mkdir()
    (folder / MPS_PID_FILE).rename(inside / MPS_PID_FILE)
    for place in (inside, folder):
        place.chmod(mode)
        assert is_mps_running(str(inside), str(folder / "proc")) is counts
        place.chmod(0o755)


def test_a_symlinked_folder_is_ignored(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    link = tmp_path_factory.mktemp("run") / "card"
    link.symlink_to(folder)
    assert not is_mps_running(str(link), str(folder / "proc"))


def test_a_missing_folder_means_no_daemon(tmp_path: Path) -> None:
    assert not is_mps_running(str(tmp_path / "nothing"))


def test_foreign_and_linked_files_prove_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(folder / MPS_PID_FILE, 1001, 1001)
    else:
        monkeypatch.setattr("os.geteuid", lambda: 1)
    assert not there(folder)
    if os.geteuid() == 0:
        os.chown(folder / MPS_PID_FILE, 0, 0)
        (folder / MPS_PID_FILE).rename(folder / "real")
        (folder / MPS_PID_FILE).symlink_to(folder / "real")
        assert not there(folder)


def test_each_gpu_reports_mps_and_instances_do_not(tmp_path: Path) -> None:
    source = WithMps(SimulatedSource("2x24GiB+1x80GiB[mig=1x1g.10gb]"), str(tmp_path))
    mine = tmp_path / simulated_uuid(1)
    mine.mkdir()
    assert [gpu.mps for gpu in source.read().gpus] == [False, False, False, None]
    (mine / MPS_PID_FILE).write_text(str(os.getpid()))
    # This very process, by its own name, is none.
    assert [gpu.mps for gpu in source.read().gpus] == [False, False, False, None]
    source.close()


# --- what a run is started with -------------------------------------------------------------------

LIMITED: dict[str, tuple[list[GpuShare], bool, bool]] = {
    # shares, whether MPS is there, whether the run is started under it
    "a slice": ([GpuShare(UUID, 0, 8192)], True, True),
    "a fraction": ([GpuShare(UUID, 0, 12032, 0.5)], True, True),
    "a slice where no daemon runs": ([GpuShare(UUID, 0, 8192)], False, False),
    "a whole card": ([GpuShare(UUID, 0)], True, False),
    "slices of two cards": ([GpuShare(UUID, 0, 8192), GpuShare("GPU-1", 1, 8192)], True, False),
    "no card": ([], True, False),
}


def placed(shares: list[GpuShare], *, is_there: bool, settings: Settings = WITH) -> tuple[GpuShare, ...]:
    seen = {uuid: sample(uuid, mps=is_there) for uuid in (UUID, "GPU-1")}
    return with_limit(Request(gpus=1), Placement("n1", tuple(shares), 1, 0), seen, settings).gpus


@pytest.mark.parametrize("name", LIMITED)
def test_shared_jobs_are_started_under_mps(name: str) -> None:
    shares, is_there, is_limited = LIMITED[name]
    assert [share.limit for share in placed(shares, is_there=is_there)] == (
        ["MPS"] if is_limited else [None] * len(shares)
    )
    assert placed(shares, is_there=is_there, settings=Settings()) == tuple(shares)


def test_each_part_of_a_gang_is_started_as_its_node_is() -> None:
    slices = (GpuShare(UUID, 0, 8192),), (GpuShare("GPU-1", 0, 8192),)
    for there in (UUID, "GPU-1"):
        seen = {uuid: sample(uuid, mps=uuid == there) for uuid in (UUID, "GPU-1")}
        place = Placement("n1", slices[0], 1, 0, others=(Placement("n2", slices[1], 1, 0),))
        found = with_limit(Request(gpus=1, nodes=2), place, seen, WITH)
        limits = {share.uuid: share.limit for one in (found, *found.others) for share in one.gpus}
        assert limits == {uuid: "MPS" if uuid == there else None for uuid in seen}


def environment(share: GpuShare, settings: Settings = WITH, **env: str) -> dict[str, str]:
    run = Run(1, 1, RunState.STARTING, "n1", "boot", 0.0, gpus=(share,), stdout_path="/x")
    found = job_environment(job(1), run, env, LaunchSite("n1", "/s"), settings, {UUID: 0})
    return {key: value for key, value in found.items() if key.startswith(("CUDA_MPS", "CUDA_VISIBLE"))}


def test_a_slice_gets_the_mps_variables_and_its_gpu_by_uuid() -> None:
    assert environment(GpuShare(UUID, 0, 8192, limit="MPS")) == {
        "CUDA_VISIBLE_DEVICES": UUID,
        "CUDA_MPS_PIPE_DIRECTORY": f"/run/mps/{UUID}",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=8192M",
    }
    assert environment(GpuShare(UUID, 0, 12032, 0.5, "MPS"))["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"


def test_submitter_variables_cannot_bypass_the_limit() -> None:
    theirs = {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/mine", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=80G"}
    assert environment(GpuShare(UUID, 0), **theirs) == {"CUDA_VISIBLE_DEVICES": "0"}
    assert environment(GpuShare(UUID, 0, 8192, limit="MPS"), **theirs)["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=8192M"
    # Where MPS is not the scheduler's, it is theirs.
    assert environment(GpuShare(UUID, 0), Settings(), **theirs)["CUDA_MPS_PIPE_DIRECTORY"] == "/tmp/mine"


WORDS: dict[str, tuple[GpuSample | None, str | None, str, str]] = {
    "under MPS": (sample(mps=True), "MPS", "MPS", "CUDA gives it no more"),
    "its daemon has gone": (sample(mps=False), "MPS", "watched", "its MPS control daemon is gone; jobs that hold more"),
    "started without, where one runs now": (
        sample(mps=True),
        None,
        "watched",
        "jobs that hold more are warned, and ended",
    ),
    "no list of processes": (sample(processes=None), None, "none", "how much each process holds"),
    "an amount that is not told": (sample(processes=[(7, None)]), None, "none", "how much some process holds"),
    "not read": (None, "MPS", "none", "its MPS control daemon is gone"),
    "an instance": (sample(mig_parent="GPU-9", mig_profile="1g.10gb"), None, "MIG", "a MIG instance 1g.10gb"),
}


@pytest.mark.parametrize("name", WORDS)
def test_limits_are_named_precisely(name: str) -> None:
    seen, limit, word, why = WORDS[name]
    found, text = enforcement(seen, WITH.gpu, limit)
    assert (found, why in text) == (word, True), text


def test_without_checks_no_limit_is_enforced() -> None:
    assert enforcement(sample(), replace(WITH.gpu, vram_over="ignore"), None)[0] == "none"


# --- whose memory a server's is -------------------------------------------------------------------


def shared(server_mib: int | None, *clients: tuple[int, int], mps: bool = True, name: str = SERVER) -> GpuTracker:
    """A card with a server of MPS and processes of the runs 1.1 and 2.1, which book 8 GiB each."""
    processes = [GpuProcess(99, server_mib, "ann", 1.0, name), *(GpuProcess(pid, mib) for pid, mib in clients)]
    used_mib = sum(process.vram_mib or 0 for process in processes)
    tracker = GpuTracker(GpuSettings(free_polls=1))
    seen = sample(vram_used_mib=used_mib, processes=processes, mps=mps)
    tracker.observe(reading(1.0, seen), {1: "1.1", 2: "2.1"}, slices(r1=8192, r2=8192))
    return tracker


def uses(tracker: GpuTracker) -> list[tuple[int | None, int | None]]:
    return [(use.used_mib, use.left_mib) for use in tracker.shares()[UUID]]


def test_a_server_is_not_foreign_and_its_context_is_not_attributed() -> None:
    tracker = shared(300, (1, 9000), (2, 1000))
    assert tracker.status(UUID).intruders == ()
    assert uses(tracker) == [(9000, 24576 - 1000), (1000, 24576 - 9000)]


@pytest.mark.parametrize("server_mib", [20000, None])
def test_memory_attributed_to_the_server_has_no_culprit(server_mib: int | None) -> None:
    assert uses(shared(server_mib, (1, 9000), (2, 1000))) == [(None, None), (None, None)]


def test_without_mps_the_process_name_is_no_excuse() -> None:
    assert [process.pid for process in shared(300, mps=False).status(UUID).intruders] == [99]
    assert [process.pid for process in shared(300, name="python").status(UUID).intruders] == [99]


def test_a_remaining_server_does_not_make_the_gpu_dirty() -> None:
    tracker = shared(400)
    tracker.begin_release(UUID, "1.1", 1.5)
    stays = sample(vram_used_mib=400, processes=[GpuProcess(99, 400, "ann", 1.0, SERVER)], mps=True)
    tracker.observe(reading(2.0, stays), {}, slices(r1=8192, r2=8192))
    assert tracker.release_state(UUID, 3.0, "1.1") == CLEAN


def test_a_gpu_without_its_daemon_says_so() -> None:
    tracker = GpuTracker(GpuSettings(free_polls=1))
    fields: dict[str, Any] = {"mps": False}
    tracker.observe(reading(1.0, sample(**fields)), {}, {})
    status = tracker.status(UUID)
    assert (status.state, status.why) == ("idle", "[gpu] mps_dir is set, but no MPS control daemon runs for it")
