"""What processes of no job cost the queue, and since when their cards do nothing."""

from __future__ import annotations

from gpu_builders import UUID, reading, sample

from gpusched.gpu.tracker import GpuTracker
from gpusched.model.settings import GpuSettings, Settings
from gpusched.model.value import replace
from gpusched.scheduler.whatif import starts_on, starts_without
from gpusched.testing import gpu_uuid, gpu_view, job, node, request, snapshot

FIRST, SECOND = gpu_uuid("n1", 0), gpu_uuid("n1", 1)
SETTINGS = Settings()


def test_a_job_delayed_by_a_foreign_process_counts() -> None:
    taken = {"why_not_whole": "foreign use of 20G: pid 7 (eva, 20G)", "foreign_mib": 20480}
    cards = [gpu_view(0, **taken), gpu_view(1, **taken)]
    jobs = [job(number, request=request(gpus=1)) for number in (1, 2, 3)]
    lab = snapshot(node(gpus=cards), waiting=jobs)
    cases = [{FIRST: 0}, {FIRST: 0, SECOND: 0}, {FIRST: 4096}, {}]
    assert starts_without(lab, SETTINGS, cases) == (1, 2, 0, 0)


def test_only_additional_starts_count() -> None:
    taken = gpu_view(0, why_not_whole="foreign use of 20G: pid 7 (eva, 20G)", foreign_mib=20480)
    jobs = [job(1, request=request(gpus=1))]
    lab = snapshot(node(gpus=[taken, gpu_view(1)]), waiting=jobs)
    assert starts_without(lab, SETTINGS, [{FIRST: 0}]) == (0,)
    assert starts_without(snapshot(node(gpus=[taken])), SETTINGS, [{FIRST: 0}]) == (0,)


def test_slices_displaced_by_a_foreign_process_count() -> None:
    taken = gpu_view(0, vram_total_mib=24576, foreign_mib=20480, why_not_whole="foreign use")
    jobs = [job(number, request=request(gpus=1, vram_mib=6144)) for number in (1, 2)]
    lab = snapshot(node(gpus=[taken]), waiting=jobs)
    assert starts_without(lab, SETTINGS, [{FIRST: 0}, {FIRST: 12288}, {FIRST: 20480}]) == (2, 1, 0)


def test_a_drained_gpu_stays_drained_without_its_foreign_process() -> None:
    taken = gpu_view(0, why_not="drained: fan", why_not_whole="foreign use", foreign_mib=20480)
    lab = snapshot(node(gpus=[taken]), waiting=[job(1, request=request(gpus=1))])
    assert starts_without(lab, SETTINGS, [{FIRST: 0}]) == (0,)


def test_a_gpu_is_idle_since_its_first_idle_reading() -> None:
    tracker = GpuTracker(replace(GpuSettings(), free_polls=1))
    shown = []
    for at, load in ((1.0, 0.9), (2.0, 0.0), (3.0, 0.02), (4.0, 0.5), (5.0, 0.01), (6.0, None), (7.0, 0.0), (8.0, 0.0)):
        tracker.observe(reading(at, sample(utilisation=load)), {}, {})
        shown.append(tracker.status(UUID).idle_since)
    assert shown == [None, 2.0, 2.0, None, 5.0, None, 7.0, 7.0]


def test_the_affected_jobs_are_named_per_gpu() -> None:
    taken = {"why_not_whole": "foreign use of 20G: pid 7 (eva, 20G)", "foreign_mib": 20480}
    cards = [gpu_view(0, **taken), gpu_view(1, **taken), gpu_view(2)]
    jobs = [job(1, request=request(gpus=1)), job(2, request=request(gpus=2))]
    lab = snapshot(node(gpus=cards), waiting=jobs)
    # The first job starts anyway, on whichever card.
    settings = replace(SETTINGS, priority=replace(SETTINGS.priority, weight_whole=0.0))
    found = starts_on(lab, settings, {FIRST: 0, SECOND: 0})
    assert set(found.values()) == {(2,)}
    assert len(found) == 2
    assert starts_on(lab, settings, {FIRST: 0}) == {}


def test_an_active_foreign_process_blocks_the_gpu_however_little_it_holds() -> None:
    busy = gpu_view(0, why_not_whole="foreign use: 90 % busy", foreign_mib=600, is_foreign_busy=True)
    lab = snapshot(node(gpus=[busy]), waiting=[job(1, request=request(gpus=1))])
    assert starts_without(lab, SETTINGS, [{FIRST: 300}, {FIRST: 0}]) == (0, 1)
