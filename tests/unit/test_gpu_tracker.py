"""What a series of readings lets the policy do with a card."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_builders import UUID, reading, sample, slices, whole

from gpusched.gpu.tracker import GpuTracker
from gpusched.model.cluster import DrainEntry, GpuProcess, GpuSample, GpuView
from gpusched.model.settings import GpuSettings
from gpusched.model.value import replace

SETTINGS = GpuSettings()


def seen(*samples: GpuSample, tracker: GpuTracker | None = None, owners: Any = None, booked: Any = None) -> GpuTracker:
    """A tracker that saw one reading a second, each with one of these samples."""
    tracker = tracker or GpuTracker(SETTINGS)
    for second, found in enumerate(samples):
        tracker.observe(reading(100.0 + second, found), owners or {}, booked or {})
    return tracker


def view(tracker: GpuTracker, now: float = 101.0) -> GpuView:
    """The only card."""
    (found,) = tracker.views(now)
    return found


def test_an_unread_gpu_is_absent() -> None:
    assert GpuTracker(SETTINGS).views(0.0) == ()
    assert GpuTracker(SETTINGS).status("GPU-9").state == "unknown"


def test_a_gpu_is_used_after_enough_good_readings() -> None:
    tracker = seen(sample())
    assert "healthy in 1 of 2 readings" in (view(tracker).why_not or "")
    assert tracker.status(UUID).state == "unknown"
    tracker.observe(reading(101.0, sample()), {}, {})
    assert view(tracker) == GpuView(UUID, 0, "A100", 24576)
    assert tracker.status(UUID).state == "idle"


@pytest.mark.parametrize(
    ("fields", "why", "state"),
    [
        ({"is_lost": True, "error": "it fell off the bus"}, "lost: it fell off the bus", "lost"),
        ({"error": "the GPU must be reset"}, "the GPU must be reset", "unknown"),
        ({"vram_used_mib": None}, "its memory cannot be read", "unknown"),
        ({"vram_total_mib": None}, "its memory cannot be read", "unknown"),
        (
            {"mig_enabled": True},
            "MIG is on without instances; create some with: gctl mig set 0 LAYOUT, or switch MIG off",
            "drained",
        ),
        ({"compute_mode": 2}, "its compute mode is prohibited; allow jobs with: nvidia-smi -c 0", "drained"),
        (
            {"compute_mode": 3, "processes": [(7, 100, "eva")]},
            "its compute mode allows one process, taken by pid 7 (eva, 100M)",
            "drained",
        ),
    ],
)
def test_a_closed_gpu_has_a_reason(fields: dict[str, Any], why: str, state: str) -> None:
    tracker = seen(*[sample(**fields)] * 3)
    assert view(tracker, 103.0).why_not == why
    status = tracker.status(UUID)
    assert (status.state, status.why) == (state, why)


def test_a_drained_gpu_shows_its_message() -> None:
    tracker = seen(sample(), sample())
    tracker.set_drains({UUID: DrainEntry("fan is broken"), "some-node": DrainEntry("other")})
    assert view(tracker).why_not == "drained: fan is broken"
    assert tracker.status(UUID).state == "drained"
    assert tracker.status(UUID, [share for _, share in whole("1.1")[UUID]]).state == "draining"
    tracker.set_drains({})
    assert view(tracker).why_not is None


@pytest.mark.parametrize(("age_s", "why"), [(14.0, None), (15.0, None), (16.0, "no reading for 16 s")])
def test_a_reading_grows_stale(age_s: float, why: str | None) -> None:
    tracker = seen(sample(), sample())
    assert view(tracker, 101.0 + age_s).why_not == why


def test_the_time_to_staleness_follows_the_poll_and_the_deadline() -> None:
    for tracker in (GpuTracker(SETTINGS, poll_s=10.0), GpuTracker(replace(SETTINGS, deadline_s=15.0))):
        seen(sample(), sample(), tracker=tracker)
        assert view(tracker, 130.0).why_not is None
        assert view(tracker, 132.0).why_not == "no reading for 31 s"


def test_a_silent_driver_stops_placement_until_it_answers_again() -> None:
    tracker = seen(sample(), sample())
    tracker.observe(reading(102.0, sample(), error="no answer from the driver for 3.0 s"), {}, {})
    assert view(tracker, 102.0).why_not == "no answer from the driver for 3.0 s"
    assert tracker.status(UUID).state == "unknown"
    tracker.observe(reading(103.0, sample()), {}, {})
    assert "in 1 of" in (view(tracker, 103.0).why_not or "")
    tracker.observe(reading(104.0, sample()), {}, {})
    assert view(tracker, 104.0).why_not is None


def test_a_lost_gpu_has_no_capacity_and_is_tested_again_on_return() -> None:
    tracker = seen(sample(), sample(), sample(is_lost=True, vram_total_mib=None, vram_used_mib=None))
    lost = view(tracker)
    assert (lost.is_present, lost.vram_total_mib, lost.why_not) == (False, 24576, "lost")
    seen(sample(), tracker=tracker)
    assert view(tracker).is_present
    assert view(tracker).why_not is not None
    seen(sample(), tracker=tracker)
    assert view(tracker).why_not is None


def test_a_gpu_missing_from_the_list_is_lost_and_the_others_are_not() -> None:
    tracker = GpuTracker(SETTINGS)
    for second in range(3):
        both = (sample("GPU-0"), sample("GPU-1"))
        tracker.observe(reading(100.0 + second, *(both if second < 2 else both[:1])), {}, {})
    here, gone = tracker.views(102.0)
    assert (here.is_present, here.why_not) == (True, None)
    assert (gone.is_present, gone.why_not) == (False, "lost: the driver no longer lists it")
    assert tracker.status("GPU-1").state == "lost"


def test_the_driver_reserve_is_not_bookable() -> None:
    assert view(seen(sample(vram_reserved_mib=576))).vram_total_mib == 24000


def test_the_bus_location_is_passed_on() -> None:
    found = view(seen(sample(link_group=3, numa=1)))
    assert (found.link_group, found.numa) == (3, 1)


@pytest.mark.parametrize(("mode", "mig", "can_share"), [(0, False, True), (3, False, False), (0, True, False)])
def test_shareable_gpus_are_recognized(mode: int, mig: bool, can_share: bool) -> None:
    assert view(seen(sample(compute_mode=mode, mig_enabled=mig))).can_share is can_share


# --- foreign use --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "foreign_mib", "why_not_whole"),
    [
        ({"vram_used_mib": 200}, 0, None),
        ({"vram_used_mib": 600}, 600, None),
        ({"vram_used_mib": 5120}, 5120, "foreign use of 5G by no visible process"),
        ({"vram_used_mib": 5120, "processes": None}, 5120, "foreign use of 5G by no visible process"),
        ({"vram_used_mib": 100, "processes": None}, 100, None),
        ({"vram_used_mib": 900, "processes": [(7, 900)]}, 900, None),
        (
            {"vram_used_mib": 3200, "processes": [(7, 3072, "eva")]},
            3072,
            "foreign use of 3G: pid 7 (eva, 3G)",
        ),
        (
            {
                "vram_used_mib": 9216,
                "processes": [(7, 512, "eva"), (8, 1024, "eva"), (9, 6144, "ann"), (10, 1536, "bob")],
            },
            9216,
            "foreign use of 9G: pid 9 (ann, 6G), pid 10 (bob, 1.5G), pid 8 (eva, 1G) and 1 more",
        ),
        (
            {"vram_used_mib": 3072, "processes": [(7, None)]},
            3072,
            "foreign use of 3G: pid 7 (unknown user)",
        ),
    ],
)
def test_foreign_memory_on_an_unbooked_gpu_counts(
    fields: dict[str, Any], foreign_mib: int, why_not_whole: str | None
) -> None:
    tracker = seen(sample(**fields), sample(**fields))
    found = view(tracker)
    assert (found.foreign_mib, found.why_not_whole, found.why_not) == (foreign_mib, why_not_whole, None)
    assert tracker.status(UUID).state == ("mixed" if why_not_whole else "idle")


@pytest.mark.parametrize(
    ("fields", "owners", "booked", "foreign_mib"),
    [
        ({"vram_used_mib": 20000, "processes": [(7, 19500)]}, {7: "1.1"}, whole("1.1"), 0),
        ({"vram_used_mib": 20000, "processes": None}, {}, whole("1.1"), 0),
        ({"vram_used_mib": 20000, "processes": [(7, 12000), (8, 8000)]}, {7: "1.1"}, whole("1.1"), 8000),
        ({"vram_used_mib": 8000, "processes": [(7, 8000)]}, {7: "1.1"}, slices(r1=8192), 0),
        ({"vram_used_mib": 9000, "processes": [(7, 9000)]}, {7: "1.1"}, slices(r1=8192), 0),
        ({"vram_used_mib": 12000, "processes": [(7, 8000)]}, {7: "1.1"}, slices(r1=8192), 3808),
        ({"vram_used_mib": 12000, "processes": None}, {}, slices(r1=8192, r2=2048), 1760),
        ({"vram_used_mib": 8000, "processes": [(7, None)]}, {7: "1.1"}, slices(r1=8192), 0),
    ],
)
def test_foreign_memory_beside_our_jobs_counts(
    fields: dict[str, Any], owners: dict[int, str], booked: Any, foreign_mib: int
) -> None:
    assert view(seen(sample(**fields), owners=owners, booked=booked)).foreign_mib == foreign_mib


def test_foreign_memory_counts_at_its_peak_for_a_while() -> None:
    tracker = GpuTracker(replace(SETTINGS, foreign_peak_s=60.0))
    for second, mib in ((0, 2000), (10, 6000), (20, 4000), (30, 0)):
        tracker.observe(reading(100.0 + second, sample(vram_used_mib=mib, processes=[(7, mib)])), {}, {})
    for now, peak_mib in ((130.0, 6000), (170.0, 6000), (171.0, 4000), (181.0, 0)):
        assert view(tracker, now).foreign_mib == peak_mib
    tracker.observe(reading(131.0, sample()), {}, {})
    assert view(tracker, 131.0).foreign_mib == 0


def test_a_gpu_in_recent_foreign_use_says_so_for_a_while() -> None:
    tracker = seen(sample(vram_used_mib=6000, processes=[(7, 6000)]), sample(), sample(), sample())
    assert view(tracker, 103.0).why_not_whole == "foreign use of 5.9G within the last 5:00"
    assert view(tracker, 103.0).why_not is None


def test_without_a_peak_window_a_gpu_must_be_seen_free_often_enough() -> None:
    tracker = GpuTracker(replace(SETTINGS, foreign_peak_s=0.0))
    busy = sample(vram_used_mib=6000, processes=[(7, 6000)])
    seen(busy, busy, sample(), tracker=tracker)
    assert view(tracker, 103.0).why_not_whole == "free in 1 of 2 readings in a row needed"
    tracker.observe(reading(103.0, sample()), {}, {})
    assert view(tracker, 103.0).why_not_whole is None


def test_a_process_later_attributed_to_a_run_was_never_foreign() -> None:
    busy = sample(vram_used_mib=6000, processes=[(7, 6000)])
    tracker = seen(busy, booked=whole("1.1"))
    assert view(tracker).foreign_mib == 6000
    seen(busy, tracker=tracker, owners={7: "1.1"}, booked=whole("1.1"))
    assert view(tracker).foreign_mib == 0


def test_a_foreign_process_with_the_reused_pid_of_a_run_counts() -> None:
    def of_pid_7(mib: int, started_at: float) -> GpuSample:
        return sample(vram_used_mib=mib, processes=[GpuProcess(7, mib, "eva", started_at, "python")])

    booked = slices(r1=4096)
    tracker = seen(of_pid_7(500, 10.0), owners={7: "1.1"}, booked=booked)
    seen(of_pid_7(500, 10.0), tracker=tracker, booked=booked)
    assert view(tracker).foreign_mib == 0
    seen(of_pid_7(6000, 20.0), tracker=tracker, booked=booked)
    assert view(tracker).foreign_mib == 6000


def test_used_host_memory_does_not_close_unified_gpus_to_whole_jobs() -> None:
    fields: dict[str, Any] = {"unified_memory": True, "vram_used_mib": 9000}
    found = view(seen(*[sample(**fields)] * 2))
    assert (found.foreign_mib, found.why_not_whole) == (0, None)
    found = view(seen(*[sample(**fields, processes=[(7, 5000)])] * 2))
    assert (found.foreign_mib, found.why_not_whole) == (5000, "foreign use of 4.9G: pid 7 (unknown user, 4.9G)")


def test_only_foreign_processes_are_listed() -> None:
    stranger = GpuProcess(8, 500, "eva", 12.0, "python")
    tracker = seen(sample(vram_used_mib=900, processes=[(7, 400), stranger]), owners={7: "1.1"}, booked=whole("1.1"))
    status = tracker.status(UUID)
    assert status.intruders == (stranger,)
    assert status.sample is not None
    assert status.sample.vram_used_mib == 900


@pytest.mark.parametrize(("booked", "state"), [(whole("1.1"), "allocated"), (slices(r1=100), "mixed"), ({}, "idle")])
def test_the_booking_state_has_a_word(booked: Any, state: str) -> None:
    assert seen(sample(), sample(), booked=booked).status(UUID).state == state


def test_views_are_in_the_order_of_the_indexes() -> None:
    tracker = GpuTracker(SETTINGS)
    tracker.observe(reading(100.0, sample("GPU-2"), sample("GPU-0"), sample("GPU-1")), {}, {})
    assert [found.index for found in tracker.views(100.0)] == [0, 1, 2]


# --- how much of no job closes a card -------------------------------------------------------------------

GIB = 1024
BIG = {"vram_total_mib": 48 * GIB}
CLOSES: dict[str, tuple[dict[str, Any], bool]] = {
    "600 MiB that do nothing on a card of 48 GB": ({**BIG, "processes": [(7, 600, "eva")]}, False),
    "1 GiB and a little more on the same": ({**BIG, "processes": [(7, 1100, "eva")]}, True),
    "two small ones that are too much together": ({**BIG, "processes": [(7, 600, "eva"), (8, 600, "bob")]}, True),
    "600 MiB on a card of 4 GiB": ({"vram_total_mib": 4 * GIB, "processes": [(7, 600, "eva")]}, True),
    "300 MiB on a card of 4 GiB": ({"vram_total_mib": 4 * GIB, "processes": [(7, 300, "eva")]}, False),
    "600 MiB that have the card work": ({**BIG, "processes": [(7, 600, "eva")], "utilisation": 0.9}, True),
    "600 MiB that work a little": ({**BIG, "processes": [(7, 600, "eva")], "utilisation": 0.3}, False),
    "work that nobody visible does": ({**BIG, "utilisation": 0.9}, False),
    "a display of 1500 MiB": ({**BIG, "processes": [(7, 1500, "eva")], "display_active": True}, False),
    "1500 MiB without a display": ({**BIG, "processes": [(7, 1500, "eva")]}, True),
    "a display of 3 GiB": ({**BIG, "processes": [(7, 3072, "eva")], "display_active": True}, True),
}


@pytest.mark.parametrize("case", CLOSES, ids=str)
def test_foreign_processes_close_a_gpu_to_whole_gpu_jobs(case: str) -> None:
    fields, closes = CLOSES[case]
    used_mib = sum(mib for _, mib, _ in fields.get("processes", ()))
    tracker = seen(*[sample(vram_used_mib=used_mib, **fields)] * 3)
    found = view(tracker, 103.0)
    assert (found.why_not_whole is not None) is closes
    # A slice may join in any case: what is taken is known.
    assert (found.why_not, found.foreign_mib) == (None, used_mib)


def test_a_gpu_reopens_soon_after_its_foreign_processes_became_idle() -> None:
    small = {"vram_used_mib": 300, "processes": [(7, 300, "eva")]}
    tracker = seen(*[sample(utilisation=0.9, **small)] * 2)
    assert "90 % busy with pid 7 (eva, 300M)" in (view(tracker, 102.0).why_not_whole or "")
    tracker.observe(reading(102.0, sample(utilisation=0.1, **small)), {}, {})
    assert "free in 1 of 2 readings in a row needed" in (view(tracker, 102.0).why_not_whole or "")
    tracker.observe(reading(103.0, sample(utilisation=0.1, **small)), {}, {})
    assert view(tracker, 103.0).why_not_whole is None


def test_utilisation_of_an_ended_job_is_not_its_neighbours() -> None:
    small = {"vram_used_mib": 300, "processes": [(7, 300, "eva")], "utilisation": 0.9}
    tracker = seen(*[sample(**small)] * 3, booked=whole("1.1"))
    tracker.observe(reading(103.0, sample(**small)), {}, {})
    assert view(tracker, 103.0).why_not_whole is None
