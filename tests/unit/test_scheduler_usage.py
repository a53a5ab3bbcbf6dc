"""What jobs hold, and how past use fades."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched import testing
from gpusched.model.planner_settings import OversubscribeSettings, PrioritySettings
from gpusched.model.queue_settings import QosSettings
from gpusched.model.resources import NOTHING, Resources
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Placement, Usage
from gpusched.model.value import replace
from gpusched.scheduler.cluster_state import ClusterLayout
from gpusched.scheduler.usage import accrued, capacity_of, charged, decayed, demand, footprint, usage_now
from gpusched.testing import NOW, allocation, gpu_view, node, request, share

GIB = 1024
DAY = 86400.0
WEEK = 7 * DAY
ONE_GPU = Resources(gpus=1.0)


def close(value: Resources, wanted: Resources) -> bool:
    pairs = zip(
        (value.gpus, value.vram_mib, value.cpus, value.mem_mib),
        (wanted.gpus, wanted.vram_mib, wanted.cpus, wanted.mem_mib),
        strict=True,
    )
    return all(one == pytest.approx(other, rel=1e-9, abs=1e-6) for one, other in pairs)


# What there is

TWO_CARDS = node("a", gpus=2, cpus=8.0, mem_mib=32 * GIB)
CAPACITIES = {
    "no machine has nothing": ([], NOTHING),
    "a node without cards": ([node(cpus=4.0, mem_mib=100)], Resources(0, 0, 4, 100)),
    "cards with their VRAM": ([TWO_CARDS], Resources(2, 48 * GIB, 8, 32 * GIB)),
    "nodes add up": ([TWO_CARDS, node("b", cpus=1.0, mem_mib=1)], Resources(2, 48 * GIB, 9, 32 * GIB + 1)),
    "a lost card is not there": (
        [node(gpus=[gpu_view(0), gpu_view(1, is_present=False)], cpus=1.0, mem_mib=1)],
        Resources(1, 24 * GIB, 1, 1),
    ),
    "a card of unknown size is a card": (
        [node(gpus=[gpu_view(0, vram_total_mib=None)], cpus=1.0, mem_mib=1)],
        Resources(1, 0, 1, 1),
    ),
    "a drained node stays in": ([node(gpus=1, why_not="drained", cpus=1.0, mem_mib=1)], Resources(1, 24 * GIB, 1, 1)),
    "a drained card stays in": (
        [node(gpus=[gpu_view(0, why_not="drained")], cpus=1.0, mem_mib=1)],
        Resources(1, 24 * GIB, 1, 1),
    ),
}


@pytest.mark.parametrize(("nodes", "wanted"), CAPACITIES.values(), ids=CAPACITIES)
def test_capacity_is_summed(nodes, wanted):
    layout = ClusterLayout(nodes, Settings())
    assert capacity_of(layout) == wanted
    assert capacity_of(layout) == wanted, "the kept answer is the same"


def test_capacity_ignores_overbooking():
    generous = replace(Settings(), oversubscribe=OversubscribeSettings(cpus=4.0, mem=2.0, vram=1.5))
    assert capacity_of(ClusterLayout([TWO_CARDS], generous)) == capacity_of(ClusterLayout([TWO_CARDS], Settings()))


# What a booking takes

MACHINES = [node("n1", gpus=4), node("n2", gpus=4)]
FOOTPRINTS = {
    "no card": (allocation(1, cpus=2.5, mem_mib=700), Resources(0, 0, 2.5, 700)),
    "a whole card has all of its VRAM": (allocation(1, gpus=[0]), Resources(1, 24 * GIB, 1, 0)),
    "two whole cards": (allocation(1, gpus=[0, 3]), Resources(2, 48 * GIB, 1, 0)),
    "a slice by memory is a part of its card": (
        allocation(1, gpus=[share(0, vram_mib=6 * GIB)]),
        Resources(0.25, 6 * GIB, 1, 0),
    ),
    "slices on two cards": (
        allocation(1, gpus=[share(0, vram_mib=12 * GIB), share(1, vram_mib=12 * GIB)]),
        Resources(1, 24 * GIB, 1, 0),
    ),
    "a fraction is that part of the card": (
        allocation(1, gpus=[share(0, fraction=0.5)]),
        Resources(0.5, (24 * GIB - 512) // 2, 1, 0),
    ),
    "a slice larger than its card, of VRAM that is oversubscribed, is a card": (
        allocation(1, gpus=[share(0, vram_mib=30 * GIB)]),
        Resources(1, 30 * GIB, 1, 0),
    ),
    "a card that has gone counts nothing": (allocation(1, gpus=[share(9)]), Resources(0, 0, 1, 0)),
    "a job that is alone takes the whole node": (
        allocation(1, gpus=[0], is_exclusive=True),
        Resources(4, 96 * GIB, 16, 64 * GIB),
    ),
}


@pytest.mark.parametrize(("held", "wanted"), FOOTPRINTS.values(), ids=FOOTPRINTS)
def test_footprint_is_summed_for(held, wanted):
    layout = ClusterLayout(MACHINES, Settings())
    booking = layout.booking(1000, held)
    assert booking is not None
    assert footprint(layout, booking) == wanted


def test_a_gang_takes_the_sum_of_its_pieces():
    layout = ClusterLayout(MACHINES, Settings())
    other = Placement("n2", (share(1, "n2"),), 2.0, 100)
    gang = Placement("n1", (share(0), share(1)), 3.0, 200, others=(other,))
    booking = layout.booking(1000, gang)
    assert booking is not None
    assert footprint(layout, booking) == Resources(3, 72 * GIB, 5, 300)


def test_a_slice_of_a_gpu_of_unknown_size_counts_as_the_whole_gpu():
    layout = ClusterLayout([node(gpus=[gpu_view(0, vram_total_mib=None)])], Settings())
    booking = layout.booking(1000, allocation(1, gpus=[share(0, vram_mib=10)]))
    assert booking is not None
    assert footprint(layout, booking).gpus == 1.0


# What a request would take

MIXED = [node(gpus=[gpu_view(0, vram_total_mib=80 * GIB), gpu_view(1, name="Tesla T4", vram_total_mib=16 * GIB)])]
DEMANDS = {
    "no card": (request(cpus=2, mem_mib=100), Resources(0, 0, 2, 100)),
    "a whole card is the smallest there is": (request(1), Resources(1, 16 * GIB, 1, 0)),
    "of a type": (request(1, gpu_type="a100"), Resources(1, 80 * GIB, 1, 0)),
    "of a size": (request(1, min_vram_mib=20 * GIB), Resources(1, 80 * GIB, 1, 0)),
    "of just the size of the larger": (request(1, min_vram_mib=80 * GIB), Resources(1, 80 * GIB, 1, 0)),
    "of just the size of the smaller": (request(1, min_vram_mib=16 * GIB), Resources(1, 16 * GIB, 1, 0)),
    "a slice as large as the small card": (request(1, vram_mib=16 * GIB), Resources(1, 16 * GIB, 1, 0)),
    "two of them": (request(2), Resources(2, 32 * GIB, 1, 0)),
    "a fraction": (request(1, gpu_fraction=0.25), Resources(0.25, 4 * GIB, 1, 0)),
    "a slice is a part of the smallest card that holds it": (
        request(1, vram_mib=8 * GIB),
        Resources(0.5, 8 * GIB, 1, 0),
    ),
    "a slice too large for the small card": (request(1, vram_mib=20 * GIB), Resources(0.25, 20 * GIB, 1, 0)),
    "slices on two cards": (request(2, vram_mib=8 * GIB), Resources(1, 16 * GIB, 1, 0)),
    "a gang takes it on every node": (
        request(2, nodes=3, cpus=4, mem_mib=10),
        Resources(6, 96 * GIB, 12, 30),
    ),
    "a type that is not there": (request(1, gpu_type="h100"), Resources(1, 0, 1, 0)),
    "a slice that no card holds": (request(1, vram_mib=99 * GIB), Resources(1, 99 * GIB, 1, 0)),
}


@pytest.mark.parametrize(("wanted", "taken"), DEMANDS.values(), ids=DEMANDS)
def test_demand_is_summed_for(wanted, taken):
    layout = ClusterLayout(MIXED, Settings())
    assert demand(layout, wanted) == taken
    assert demand(layout, wanted) == taken, "the kept card sizes are the same"


def test_demand_without_machines_counts_the_gpus():
    assert demand(ClusterLayout([], Settings()), request(2)) == Resources(2, 0, 1, 0)


@pytest.mark.parametrize(
    ("wanted", "held"),
    [
        (request(2), [0, 1]),
        (request(1, gpu_fraction=0.5), [share(0, fraction=0.5)]),
        (request(1, vram_mib=6 * GIB), [share(0, vram_mib=6 * GIB)]),
    ],
)
def test_on_equal_gpus_demand_and_footprint_agree(wanted, held):
    layout = ClusterLayout([node(gpus=4)], Settings())
    booking = layout.booking(1000, allocation(1, gpus=held))
    assert booking is not None
    assert demand(layout, wanted).gpus == footprint(layout, booking).gpus


# Decay

DECAYS = {
    "nothing passes": (0.0, WEEK, 1.0),
    "one half-life": (WEEK, WEEK, 0.5),
    "two half-lives": (2 * WEEK, WEEK, 0.25),
    "half of one": (WEEK / 2, WEEK, 0.5**0.5),
    "a clock that was set back": (-5 * WEEK, WEEK, 1.0),
    "a very long time": (1e6 * WEEK, WEEK, 0.0),
    "half a second": (1.0, 0.5, 0.25),
    "nothing is ever forgotten": (WEEK, inf, 1.0),
    "nothing is ever remembered": (1.0, 0.0, 0.0),
    "nothing is remembered, and no time has passed": (0.0, 0.0, 1.0),
}


@pytest.mark.parametrize(("elapsed_s", "half_life_s", "left"), DECAYS.values(), ids=DECAYS)
def test_usage_decays_when(elapsed_s, half_life_s, left):
    used = Resources(8, 16, 24, 32)
    assert close(decayed(used, elapsed_s, half_life_s), used.times(left))


def summed(start_at: float, until_at: float, now: float, half_life_s: float, steps: int = 20_000) -> float:
    """The integral by brute force, midpoint rule."""
    width = (until_at - start_at) / steps
    ages = (now - (start_at + (step + 0.5) * width) for step in range(steps))
    return sum(2 ** (-age / half_life_s) * width for age in ages)


@pytest.mark.parametrize(
    ("start_at", "until_at", "now"),
    [(0.0, 100.0, 100.0), (0.0, 100.0, 500.0), (0.0, 7 * DAY, 8 * DAY), (DAY, 30 * DAY, 40 * DAY), (0.0, 1.0, 1e5)],
)
@pytest.mark.parametrize("half_life_s", [50.0, DAY, WEEK])
def test_accrued_is_the_decayed_integral(start_at, until_at, now, half_life_s):
    wanted = summed(start_at, until_at, now, half_life_s)
    assert accrued(ONE_GPU, start_at, until_at, now, half_life_s).gpus == pytest.approx(wanted, rel=1e-4, abs=1e-9)


ACCRUALS = {
    "a run shorter than the half-life counts nearly its seconds": (0.0, 60.0, 60.0, WEEK, 60.0),
    "no decay counts exactly its seconds": (0.0, 3600.0, 9e9, inf, 3600.0),
    "an endless run never counts more than half-life / ln 2": (0.0, 1e12, 1e12, 100.0, 100 / 0.693147180559945),
    "a run that has not begun": (100.0, 100.0, 100.0, WEEK, 0.0),
    "a clock set back to before the start": (100.0, 40.0, 40.0, WEEK, 0.0),
    "an end in the future has no age": (0.0, 60.0, 30.0, inf, 60.0),
    "half a second of memory": (0.0, 3600.0, 3600.0, 0.5, 0.5 / 0.693147180559945),
    "nothing is remembered": (0.0, 60.0, 60.0, 0.0, 0.0),
}


@pytest.mark.parametrize(("start_at", "until_at", "now", "half_life_s", "seconds"), ACCRUALS.values(), ids=ACCRUALS)
def test_usage_accrues_when(start_at, until_at, now, half_life_s, seconds):
    assert accrued(ONE_GPU, start_at, until_at, now, half_life_s).gpus == pytest.approx(seconds, rel=1e-4)


instants = st.floats(0, 1e9)
half_lives = st.floats(1, 1e9)


@given(instants, instants, instants, half_lives)
def test_usage_is_never_negative_under_any_clock(start_at, until_at, now, half_life_s):
    assert accrued(ONE_GPU, start_at, until_at, now, half_life_s).gpus >= 0
    assert decayed(ONE_GPU, now - until_at, half_life_s).gpus >= 0
    before = Usage("a", "ann", ONE_GPU, until_at)
    assert charged(before, "a", "ann", ONE_GPU, start_at, until_at, now, half_life_s).used.gpus >= 0


@given(st.lists(instants, min_size=4, max_size=4), half_lives)
def test_a_run_in_two_pieces_counts_as_one(four, half_life_s):
    start_at, cut_at, until_at, now = sorted(four)
    whole = accrued(ONE_GPU, start_at, until_at, now, half_life_s).gpus
    first = accrued(ONE_GPU, start_at, cut_at, now, half_life_s).gpus
    second = accrued(ONE_GPU, cut_at, until_at, now, half_life_s).gpus
    assert first + second == pytest.approx(whole, rel=1e-6, abs=1e-6)


@given(st.lists(instants, min_size=4, max_size=4), half_lives)
def test_counting_now_or_counting_earlier_and_decaying_is_the_same(four, half_life_s):
    start_at, until_at, seen_at, now = sorted(four)
    earlier = accrued(ONE_GPU, start_at, until_at, seen_at, half_life_s)
    later = accrued(ONE_GPU, start_at, until_at, now, half_life_s)
    assert decayed(earlier, now - seen_at, half_life_s).gpus == pytest.approx(later.gpus, rel=1e-6, abs=1e-6)


# Charging


def test_the_first_run_makes_the_usage():
    made = charged(None, "lab", "ann", Resources(2, 0, 4, 0), 0.0, 100.0, 100.0, inf)
    assert made == Usage("lab", "ann", Resources(200, 0, 400, 0), 100.0)


def test_a_run_is_added_to_the_decayed_usage():
    before = Usage("lab", "ann", Resources(gpus=1000.0), 0.0)
    made = charged(before, "lab", "ann", ONE_GPU, WEEK - 10, WEEK, WEEK, WEEK)
    assert made.at == WEEK
    assert made.used.gpus == pytest.approx(500 + 10, rel=1e-5)


@pytest.mark.parametrize(("factor", "seconds"), [(1.0, 100.0), (2.0, 200.0), (0.0, 0.0), (0.5, 50.0), (-1.0, 0.0)])
def test_the_usage_factor_of_the_qos_applies(factor, seconds):
    made = charged(None, "lab", "ann", ONE_GPU, 0.0, 100.0, 100.0, inf, factor)
    assert made.used.gpus == seconds


def test_a_clock_set_back_keeps_earlier_usage():
    before = Usage("lab", "ann", Resources(gpus=1000.0), 5000.0)
    made = charged(before, "lab", "ann", ONE_GPU, 100.0, 200.0, 200.0, WEEK)
    assert made.used.gpus == pytest.approx(1100, rel=1e-3)
    assert made.at == 200.0


def test_the_order_in_which_runs_are_charged_does_not_matter():
    runs = [(0.0, 50.0), (10.0, 300.0), (200.0, 290.0)]
    forward = backward = None
    for start_at, end_at in runs:
        forward = charged(forward, "lab", "ann", ONE_GPU, start_at, end_at, 1000.0, 100.0)
    for start_at, end_at in reversed(runs):
        backward = charged(backward, "lab", "ann", ONE_GPU, start_at, end_at, 1000.0, 100.0)
    assert forward is not None
    assert backward is not None
    assert close(forward.used, backward.used)


# Now

FOR_EVER = replace(Settings(), priority=PrioritySettings(half_life_s=inf))


def now_of(*held, usage=(), settings=FOR_EVER):
    machines = testing.snapshot(*MACHINES, running=held)
    return usage_now(replace(machines, usage=tuple(usage)), ClusterLayout(MACHINES, settings), settings)


def test_initial_usage_is_zero():
    assert now_of() == {}


def test_an_open_run_counts_since_its_start():
    used = now_of(allocation(1, gpus=[0], user="ann", account="lab", start_at=NOW - 100, mem_mib=10))
    assert used == {("lab", "ann"): Resources(100, 24 * GIB * 100, 100, 1000)}


def test_a_run_that_starts_in_the_future_has_used_nothing():
    assert now_of(allocation(1, user="ann", account="lab", start_at=NOW + 100)) == {("lab", "ann"): NOTHING}


def test_open_runs_add_to_ended_ones():
    ended = Usage("lab", "ann", Resources(cpus=50.0), NOW - 10)
    used = now_of(allocation(1, user="ann", account="lab", start_at=NOW - 100), usage=[ended])
    assert used[("lab", "ann")].cpus == 150


def test_users_and_accounts_are_kept_apart():
    used = now_of(
        allocation(1, user="ann", account="lab", start_at=NOW - 1),
        allocation(2, user="bob", account="lab", start_at=NOW - 2),
        allocation(3, user="ann", account="chem", start_at=NOW - 3),
    )
    assert {mark: held.cpus for mark, held in used.items()} == {
        ("lab", "ann"): 1,
        ("lab", "bob"): 2,
        ("chem", "ann"): 3,
    }


def test_the_pieces_of_a_gang_add_up():
    used = now_of(
        allocation(1, "n1", gpus=[0], user="ann", account="lab", start_at=NOW - 10),
        allocation(1, "n2", gpus=[1], user="ann", account="lab", start_at=NOW - 10),
    )
    assert used[("lab", "ann")].gpus == 20


def test_a_suspended_job_uses_memory_but_no_cores():
    used = now_of(allocation(1, user="ann", account="lab", cpus=4.0, mem_mib=5, is_suspended=True, start_at=NOW - 10))
    assert used[("lab", "ann")] == Resources(0, 0, 0, 50)


def test_a_removed_node_counts_nothing():
    assert now_of(allocation(1, "n9", user="ann", account="lab")) == {}


@pytest.mark.parametrize(("qos", "cores"), [("", 100.0), ("free", None), ("double", 200.0), ("forgotten", 100.0)])
def test_the_qos_scales_usage(qos, cores):
    settings = replace(
        FOR_EVER,
        qos={"free": QosSettings("free", usage_factor=0.0), "double": QosSettings("double", usage_factor=2.0)},
    )
    used = now_of(allocation(1, user="ann", account="lab", qos=qos, start_at=NOW - 100), settings=settings)
    assert (used[("lab", "ann")].cpus if used else None) == cores


def test_past_usage_decays_by_the_half_life():
    settings = replace(Settings(), priority=PrioritySettings(half_life_s=DAY))
    ended = Usage("lab", "ann", Resources(gpus=64.0), NOW - 3 * DAY)
    assert now_of(usage=[ended], settings=settings)[("lab", "ann")].gpus == pytest.approx(8)


def test_ending_now_or_being_open_gives_the_same_usage():
    settings = replace(Settings(), priority=PrioritySettings(half_life_s=DAY))
    layout = ClusterLayout(MACHINES, settings)
    held = allocation(1, gpus=[0, 1], user="ann", account="lab", cpus=3.0, mem_mib=7, start_at=NOW - 2 * DAY)
    booking = layout.booking(1000, held)
    assert booking is not None
    ended = charged(None, "lab", "ann", footprint(layout, booking), held.start_at, NOW, NOW, DAY)
    assert close(now_of(held, settings=settings)[("lab", "ann")], ended.used)
