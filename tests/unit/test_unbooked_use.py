"""Jobs on GPUs that they did not book: kept apart from those who did, named to those who wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accidents import AccidentLab
from gpu_builders import UUID, reading, sample, slices, whole

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.gpu.release import CLEAN
from gpusched.gpu.tracker import GpuTracker
from gpusched.model.cluster import GpuProcess
from gpusched.model.job import ArraySpec
from gpusched.model.mentions import render
from gpusched.model.settings import GpuSettings
from gpusched.model.states import JobState
from gpusched.testing import request

GIB = 1024
FOREVER = SimulatedOutcome(runs_s=1e9)
MakeLab = Callable[..., AccidentLab]


def start(lab: AccidentLab, **parts: Any) -> int:
    """A job of one GPU that runs."""
    job_id = lab.submit(**{"request": request(gpus=1), **parts})
    assert lab.job(job_id).state is JobState.RUNNING
    lab.tick()
    return job_id


def why(lab: AccidentLab, job_id: int) -> str:
    reason = lab.scheduler.answers.reason_for(lab.job(job_id))
    assert reason is not None
    return render(reason.text)


# --- placement --------------------------------------------------------------------------------------


def test_unbooked_use_keeps_whole_gpu_jobs_off_and_names_the_job(accidents: MakeLab) -> None:
    lab = accidents(gpus=2)
    astray = start(lab)
    lab.use(astray, 1, 20 * GIB)
    lab.tick(1)
    waits = lab.submit(request=request(gpus=1))
    assert lab.job(waits).state is JobState.PENDING
    unbooked = f"GPU 1 of node n1: unbooked use of 20G: job {astray}, which did not book it"
    assert f"; not available: {unbooked}" in why(lab, waits)
    # One that wants more than there is without that GPU hears of it, too.
    both = lab.submit(request=request(gpus=2))
    assert unbooked in why(lab, both)


def test_a_job_without_gpus_is_treated_the_same(accidents: MakeLab) -> None:
    lab = accidents(gpus=1)
    astray = start(lab, request=request())
    lab.use(astray, 0, 20 * GIB)
    lab.tick(1)
    waits = lab.submit(request=request(gpus=1))
    assert lab.job(waits).state is JobState.PENDING
    assert f"job {astray}, which did not book it" in why(lab, waits)


def test_unbooked_use_counts_as_booked_where_slices_are_placed(accidents: MakeLab) -> None:
    lab = accidents(gpus=2)
    astray = start(lab)
    lab.use(astray, 1, 20 * GIB)
    lab.tick(1)
    total = lab.devices[1].total_mib
    small = lab.submit(request=request(gpus=1, vram_mib=2 * GIB))
    large = lab.submit(request=request(gpus=1, vram_mib=total - 20 * GIB))
    assert lab.job(small).state is JobState.RUNNING
    assert lab.job(large).state is JobState.PENDING
    assert f"job {astray}, which did not book it" in why(lab, large)


def test_a_task_of_an_array_is_shown_by_its_display_id(accidents: MakeLab) -> None:
    lab = accidents(gpus=2)
    array = lab.submit(request=request(gpus=1), array=ArraySpec("3"))
    (run,) = lab.scheduler.state.open_runs.values()
    lab.use(run.id, 1, 20 * GIB)
    lab.tick(1)
    waits = lab.submit(request=request(gpus=1))
    assert f"job {array}_3, which did not book it" in why(lab, waits)


def test_a_gpu_is_available_again_as_soon_as_the_job_ends(accidents: MakeLab) -> None:
    # Foreign memory counts at its peak for minutes, since its process may take it again. An ended run cannot.
    lab = accidents(gpus=2)
    astray = start(lab)
    lab.use(astray, 1, 20 * GIB)
    lab.tick(1)
    waits = lab.submit(request=request(gpus=2))
    assert lab.job(waits).state is JobState.PENDING
    lab.tick(20)
    lab.tick(1)
    assert lab.job(astray).state is JobState.COMPLETED
    lab.tick(1)
    assert lab.job(waits).state is JobState.RUNNING


def test_unbooked_use_counts_between_two_processes_of_a_running_job(accidents: MakeLab) -> None:
    lab = accidents(gpus=2, outcome=FOREVER)
    astray = start(lab)
    lab.use(astray, 1, 20 * GIB)
    lab.tick(1)
    lab.uses.clear()
    lab.tick(1)
    waits = lab.submit(request=request(gpus=1))
    assert f"unbooked use of 20G within the last 5:00: job {astray}, which did not book it" in why(lab, waits)
    lab.tick(301)
    assert lab.job(waits).state is JobState.RUNNING


def test_memory_left_by_an_ended_run_on_an_unbooked_gpu_keeps_it_closed(accidents: MakeLab) -> None:
    lab = accidents(gpus=2)
    astray = start(lab)
    lab.use(astray, 1, 20 * GIB, leaves=20 * GIB)
    lab.tick(20)
    lab.tick(1)
    lab.tick(1)
    assert lab.job(astray).state is JobState.COMPLETED
    first = lab.submit(request=request(gpus=1))
    second = lab.submit(request=request(gpus=1))
    assert lab.job(first).state is JobState.RUNNING
    assert lab.job(second).state is JobState.PENDING
    assert "foreign use of 20G by no visible process" in why(lab, second)


# --- one reading against the bookings ---------------------------------------------------------------


def seen(*processes: tuple[int, int | None], booked: Any = None, times: int = 1, **fields: Any) -> GpuTracker:
    """A card with these processes, of which pid N is of run N.1, in each of so many readings."""
    tracker = GpuTracker(GpuSettings(free_polls=1))
    fields.setdefault("vram_used_mib", sum(mib or 0 for _, mib in processes))
    owners = {pid: f"{pid}.1" for pid, _ in processes}
    for at in range(times):
        found = sample(processes=processes, **fields)
        tracker.observe(reading(float(at + 1), found), owners, booked or {}, {run: run[:-2] for run in owners.values()})
    return tracker


def why_not(tracker: GpuTracker) -> str | None:
    (view,) = tracker.views(1.0)
    return view.why_not_whole and render(view.why_not_whole)


def test_use_of_a_booked_gpu_is_not_an_intrusion() -> None:
    tracker = seen((1, 9000), booked=whole("1.1"))
    assert tracker.status(UUID).intruders == ()
    assert why_not(tracker) is None


def test_unbooked_use_of_a_booked_gpu_is_distinguished_from_its_own() -> None:
    tracker = seen((1, 9000), (2, 4000), booked=whole("1.1"))
    assert [(one.pid, one.run) for one in tracker.status(UUID).intruders] == [(2, "2.1")]
    assert why_not(tracker) == "unbooked use of 3.9G: job 2, which did not book it"
    assert tracker.meter("2.1") is None
    meter = tracker.meter("1.1")
    assert meter is not None
    assert meter.peak_vram_mib == 9000


def test_beside_slices_it_reduces_their_room() -> None:
    tracker = seen((1, 9000), (3, 6000), booked=slices(r1=8192, r2=8192))
    uses = {use.run: (use.used_mib, use.left_mib) for use in tracker.shares()[UUID]}
    assert uses == {"1.1": (9000, 24576 - 6000), "2.1": (0, 24576 - 6000 - 9000)}


def test_a_releasing_run_is_still_booked() -> None:
    tracker = seen((1, 9000), booked=whole("1.1"))
    tracker.begin_release(UUID, "1.1", 2.0)
    tracker.observe(reading(3.0, sample(vram_used_mib=9000, processes=[(1, 9000)])), {1: "1.1"}, whole("1.1"))
    assert tracker.status(UUID).intruders == ()


def test_unbooked_use_does_not_hold_up_the_release_of_another_run() -> None:
    tracker = seen((1, 9000), (2, 4000), booked=whole("1.1"))
    tracker.begin_release(UUID, "1.1", 2.0)
    left = sample(vram_used_mib=4000, processes=[(2, 4000)])
    tracker.observe(reading(3.0, left), {2: "2.1"}, whole("1.1"), {"2.1": "2"})
    assert tracker.release_state(UUID, 3.0, "1.1") == CLEAN


def test_jobs_and_foreign_processes_are_distinguished() -> None:
    tracker = GpuTracker(GpuSettings(free_polls=1))
    stranger = GpuProcess(9, 4096, "eva", 12.0, "python")
    found = sample(vram_used_mib=14 * GIB, processes=[(1, 4 * GIB), (2, 4 * GIB), (3, 2 * GIB), stranger])
    owners = {1: "1.1", 2: "2.1", 3: "2.1"}
    tracker.observe(reading(1.0, found), owners, {}, {"1.1": "1", "2.1": "2"})
    assert why_not(tracker) == (
        "unbooked use of 10G: jobs 1 and 2, which did not book it; foreign use of 4G: pid 9 (eva, 4G)"
    )


def test_unreported_process_memory_is_the_unattributed_rest() -> None:
    tracker = seen((1, None), vram_used_mib=9216)
    assert why_not(tracker) == "unbooked use of 9G: job 1, which did not book it"
    # A whole booking explains all that its own processes are not seen to hold.
    assert why_not(seen((1, 100), (2, None), vram_used_mib=9216, booked=whole("1.1"))) is None


def test_a_busy_gpu_is_closed_however_little_memory_is_held() -> None:
    tracker = seen((1, 100), utilisation=0.9, times=2)
    assert why_not(tracker) == "unbooked use: 90 % busy with job 1, which did not book it"


def test_processes_under_mps_are_not_attributed_to_its_server() -> None:
    tracker = seen((1, 4096), (7, 300), mps=True, booked=whole("7.1"))
    assert [one.run for one in tracker.status(UUID).intruders] == ["1.1"]


def test_a_gpu_that_admits_one_process_names_the_job() -> None:
    (view,) = seen((1, 100), compute_mode=3).views(1.0)
    assert render(view.why_not or "") == "its compute mode allows one process, taken by job 1, which did not book it"


def test_a_run_on_a_mig_instance_intrudes_only_on_other_instances() -> None:
    tracker = GpuTracker(GpuSettings(free_polls=1))
    processes = [(1, 4000)]
    card = sample("GPU-0", mig_enabled=True, mig_instances=2, vram_used_mib=8000, processes=processes)
    parts = [
        sample(
            uuid, index=1021 + at, mig_parent="GPU-0", mig_profile="1g.12gb", vram_used_mib=4000, processes=processes
        )
        for at, uuid in enumerate(("MIG-0", "MIG-1"))
    ]
    tracker.observe(reading(1.0, card, *parts), {1: "1.1"}, whole("1.1", "MIG-0"), {"1.1": "1"})
    intruders = {uuid: [one.run for one in tracker.status(uuid).intruders] for uuid in ("GPU-0", "MIG-0", "MIG-1")}
    assert intruders == {"GPU-0": [], "MIG-0": [], "MIG-1": ["1.1"]}


def test_a_process_that_outlives_its_run_is_not_foreign_once_gone() -> None:
    # Its run is over, so it is nobody's for a moment; but it was seen as that run's.
    tracker = seen((1, 9000), booked=whole("1.1"))
    tracker.begin_release(UUID, "1.1", 1.5)
    tracker.observe(reading(2.0, sample(vram_used_mib=9000, processes=[(1, 9000)])), {}, whole("1.1"))
    tracker.observe(reading(3.0, sample()), {}, whole("1.1"))
    (view,) = tracker.views(3.0)
    assert (tracker.release_state(UUID, 3.0, "1.1"), view.foreign_mib) == (CLEAN, 0)


def test_memory_of_an_ended_run_that_reappears_counts_while_it_is_there() -> None:
    tracker = seen((1, 9216))
    tracker.observe(reading(2.0, sample(vram_used_mib=9216)), {}, {}, {})
    assert why_not(tracker) == "foreign use of 9G by no visible process"
    tracker.observe(reading(3.0, sample(vram_used_mib=9216)), {}, {}, {})
    assert why_not(tracker) == "foreign use of 9G by no visible process"
    tracker.observe(reading(4.0, sample()), {}, {}, {})
    (view,) = tracker.views(4.0)
    assert (view.foreign_mib, view.why_not_whole) == (0, None)
