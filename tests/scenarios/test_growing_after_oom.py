"""A job whose GPU memory ran out asks for more: the ladder, rung by rung, and what is not on it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab import Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.errors import Refused
from gpusched.lifecycle.retry import LargerRequest, NothingLarger, larger_request
from gpusched.model.cluster import NodeView
from gpusched.model.job import GpuShare, Request, RetryRule
from gpusched.model.queue_settings import QosSettings, QueueSettings
from gpusched.model.settings import DefaultSettings, IsolationSettings, LifeSettings, Settings
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.value import replace
from gpusched.scheduler.admission import slice_refusal
from gpusched.scheduler.infeasible import refusal
from gpusched.testing import gpu_view, job, node, request, run, spec

GIB = 1024


def small_and_large() -> NodeView:
    """Card 0 with 16 GiB, cards 1 and 2 with 24, card 3 with 80."""
    sizes = [16, 24, 24, 80]
    cards = [gpu_view(at, vram_total_mib=size * GIB, name=f"Card{size}") for at, size in enumerate(sizes)]
    return node("n1", gpus=cards)


def grow(
    asked: Request, *cards: int, on: NodeView | None = None, growth: float = 1.5, peak: int | None = None
) -> LargerRequest | NothingLarger | None:
    on = on or small_and_large()
    shares = tuple(
        GpuShare(on.gpus[card].uuid, card, vram_mib=asked.vram_mib, fraction=asked.gpu_fraction) for card in cards
    )
    settings = replace(Settings(), life=LifeSettings(oom_growth=growth))
    ended = run(job(1, request=asked), gpus=shares, peak_vram_mib=peak)
    return larger_request(asked, ended, [on], settings, lambda wish: refusal(wish, [on], settings) is None)


LADDER = {
    "a slice grows by half": (request(gpus=1, vram_mib=8 * GIB), [0], None, request(gpus=1, vram_mib=12 * GIB)),
    "a small slice grows by a step at least": (request(gpus=1, vram_mib=100), [0], None, request(gpus=1, vram_mib=512)),
    "a slice that used more than it booked grows beyond that": (
        request(gpus=1, vram_mib=4 * GIB),
        [0],
        12 * GIB,
        request(gpus=1, vram_mib=15 * GIB),
    ),
    "slices on two cards grow alike": (
        request(gpus=2, vram_mib=8 * GIB),
        [0, 1],
        None,
        request(gpus=2, vram_mib=12 * GIB),
    ),
    "a slice too large for the cards of its type becomes a whole card": (
        request(gpus=1, vram_mib=20 * GIB, gpu_type="card24"),
        [1],
        None,
        request(gpus=1, gpu_type="card24", min_vram_mib=24 * GIB),
    ),
    "a slice too large for any card becomes a whole one that is larger than it": (
        request(gpus=1, vram_mib=60 * GIB),
        [3],
        None,
        request(gpus=1, min_vram_mib=80 * GIB),
    ),
    "a quarter becomes a half": (request(gpus=1, gpu_fraction=0.25), [1], None, request(gpus=1, gpu_fraction=0.5)),
    "a half becomes a whole card that is larger than half of the one it was on": (
        request(gpus=1, gpu_fraction=0.5),
        [1],
        None,
        request(gpus=1, min_vram_mib=16 * GIB),
    ),
    "a whole card becomes the next larger one": (request(gpus=1), [0], None, request(gpus=1, min_vram_mib=24 * GIB)),
    "and the next": (request(gpus=1, min_vram_mib=24 * GIB), [1], None, request(gpus=1, min_vram_mib=80 * GIB)),
    "two whole cards become two larger ones": (
        request(gpus=2),
        [0, 0],
        None,
        request(gpus=2, min_vram_mib=24 * GIB),
    ),
}


@pytest.mark.parametrize("name", LADDER)
def test_requests_grow_along_the_ladder(name: str) -> None:
    asked, cards, peak, expected = LADDER[name]
    found = grow(asked, *cards, peak=peak)
    assert isinstance(found, LargerRequest)
    assert found.request == expected


AT_THE_TOP = {
    "the largest card of all": (request(gpus=1), [3]),
    "the largest of its type": (request(gpus=1, gpu_type="card24"), [1]),
    "as many cards of the next size are not there": (request(gpus=2, min_vram_mib=24 * GIB), [1, 2]),
}


@pytest.mark.parametrize("name", AT_THE_TOP)
def test_a_job_at_the_top_is_not_retried(name: str) -> None:
    asked, cards = AT_THE_TOP[name]
    assert isinstance(grow(asked, *cards), NothingLarger)


def test_unknown_usage_retries_the_same_request() -> None:
    asked = request(gpus=1)
    cards = small_and_large().gpus
    unread = replace(small_and_large(), gpus=(cards[0], replace(cards[1], vram_total_mib=None), *cards[2:]))
    squatted = replace(small_and_large(), gpus=(*cards[:3], replace(cards[3], foreign_mib=9 * GIB)))
    assert grow(asked, 1, on=unread) is None
    assert grow(asked, 3, on=squatted) is None
    assert grow(asked, 3, on=replace(small_and_large(), gpu_error="no driver")) is None
    assert grow(asked, 3, growth=1) is None


@given(
    st.one_of(
        st.builds(request, gpus=st.integers(1, 2), vram_mib=st.integers(1, 80 * GIB)),
        st.builds(request, gpus=st.just(1), gpu_fraction=st.floats(0.01, 0.99)),
        st.builds(request, gpus=st.integers(1, 4), min_vram_mib=st.none() | st.integers(1, 80 * GIB)),
    ),
    st.lists(st.integers(0, 3), min_size=1, max_size=1),
    st.floats(1.2, 8),
)
def test_each_rung_is_available_and_the_ladder_ends(asked: Request, cards: list[int], growth: float) -> None:
    settings, machines = Settings(), [small_and_large()]
    at = cards[0]
    for _ in range(60):
        total_mib = small_and_large().gpus[at].vram_total_mib or 0
        had_mib = asked.vram_mib or (int(total_mib * asked.gpu_fraction) if asked.gpu_fraction else total_mib)
        found = grow(asked, at, growth=growth)
        if not isinstance(found, LargerRequest):
            assert isinstance(found, NothingLarger)
            return
        assert refusal(found.request, machines, settings) is None
        asked = found.request
        # The smallest card that it may be on now.
        sizes = [card.vram_total_mib or 0 for card in small_and_large().gpus]
        least_mib = asked.vram_mib or asked.min_vram_mib or 0
        at = next(number for number, size in enumerate(sizes) if size >= least_mib)
        if asked.gpu_fraction is None:
            assert (asked.vram_mib or sizes[at]) > had_mib
    raise AssertionError("the ladder does not end")


def test_the_history_records_the_larger_request_and_the_end() -> None:
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=1, exit_code=1, gpu_oom=True))
    job_id = lab.submit(request=request(gpus=1, vram_mib=50000), retry=RetryRule(retries=5, backoff_s=0))
    for _ in range(12):
        lab.tick(1)
    found = lab.job(job_id)
    story = [event.text for event in lab.store.events(job_id) if event.kind in ("retry", "note")]
    assert story == [
        "retry 1 of 5 in 0.0s, with 73.2G of VRAM instead of 48.8G of VRAM",
        "retry 2 of 5 in 0.0s, with a whole GPU of 80G instead of 73.2G of VRAM",
        "not retried: this cluster has no more GPU memory for it than a whole GPU of 80G",
    ]
    assert (found.state, found.reason, found.run) == (JobState.OUT_OF_MEMORY, ReasonCode.OUT_OF_MEMORY, 3)
    assert found.reason_text is not None
    assert found.reason_text.endswith(story[-1])


def test_a_queue_that_admits_no_whole_card_ends_the_ladder() -> None:
    queue = {"default": QueueSettings("default", max_gpus_per_job=0.9)}
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=1, exit_code=1, gpu_oom=True), queue=queue)
    job_id = lab.submit(request=request(gpus=1, vram_mib=55000), retry=RetryRule(retries=5, backoff_s=0))
    for _ in range(6):
        lab.tick(1)
    assert (lab.job(job_id).state, lab.job(job_id).run) == (JobState.OUT_OF_MEMORY, 1)


def test_a_slice_impossible_in_its_queue_ends_the_ladder_without_waiting() -> None:
    queue = {"default": QueueSettings("default", max_gpus_per_job=0.5)}
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=1, exit_code=1, gpu_oom=True), queue=queue)
    # Of a card of 80G: 30G is less than half of it, 45G more.
    job_id = lab.submit(request=request(gpus=1, vram_mib=30 * GIB), retry=RetryRule(retries=5, backoff_s=0))
    for _ in range(6):
        lab.tick(1)
    found = lab.job(job_id)
    assert (found.state, found.run) == (JobState.OUT_OF_MEMORY, 1)
    assert found.reason_text is not None
    assert found.reason_text.endswith("not retried: this cluster has no more GPU memory for it than 30G of VRAM")


ABOVE_A_LIMIT: dict[str, dict[str, Any]] = {
    "of a job in a queue": {"queue": {"default": QueueSettings("default", max_gpus_per_job=0.5)}},
    "of a user in a queue": {"queue": {"default": QueueSettings("default", max_gpus_per_user=0.5)}},
    "of a queue": {"queue": {"default": QueueSettings("default", max_gpus=0.5)}},
    "of a job in a QOS": {"qos": {"q": QosSettings("q", max_gpus_per_job=0.5)}, "default": DefaultSettings(qos="q")},
}


@pytest.mark.parametrize("name", ABOVE_A_LIMIT)
def test_a_slice_that_would_wait_for_ever_is_refused_with_the_largest_possible_one(name: str) -> None:
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=1), **ABOVE_A_LIMIT[name])
    (refused,) = lab.ask(lab.submission(request=request(gpus=1, vram_mib=45 * GIB)))
    assert isinstance(refused, Refused)
    assert refused.message.startswith("asked for 45G of VRAM; ")
    assert refused.message.endswith("; this job needs 0.56")
    assert refused.hint == "ask for less: --vram 40G, or name another queue or QOS"
    job = lab.submit(request=request(gpus=1, vram_mib=40 * GIB))
    assert lab.job(job).state is JobState.RUNNING
    (refused,) = lab.ask(lab.submission(request=request(gpus=2, nodes=1, vram_mib=45 * GIB)))
    assert isinstance(refused, Refused)


def test_a_slice_of_an_unreadable_gpu_is_admitted_to_wait() -> None:
    nodes = [replace(small_and_large(), gpu_error="no driver", gpus=())]
    settings = Settings(queue={"default": QueueSettings("default", max_gpus_per_job=0.5)})
    assert slice_refusal(spec(request=request(gpus=1, vram_mib=45 * GIB)), "ann", nodes, settings) is None


# --- host memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("had_mib", "wanted_mib"),
    {100: 512, 1024: 1536, 40_000: 60_160, 50_000: 65_536, 65_536: None}.items(),
)
def test_host_memory_grows_up_to_the_node_total(had_mib: int, wanted_mib: int | None) -> None:
    machines = [node("n1", mem_mib=65_536)]
    asked = request(mem_mib=had_mib)
    ended = replace(run(job(1, request=asked)), reason=ReasonCode.MEM_LIMIT)
    found = larger_request(asked, ended, machines, Settings(), lambda wish: refusal(wish, machines, Settings()) is None)
    if wanted_mib is None:
        assert isinstance(found, NothingLarger)
        assert found.text == "not retried: this cluster has no more host memory for it than 64G"
    else:
        assert isinstance(found, LargerRequest)
        assert found.request == request(mem_mib=wanted_mib)


def test_a_default_limit_grows_from_the_site_setting() -> None:
    ended = replace(run(job(1, request=request())), reason=ReasonCode.MEM_LIMIT)
    settings = replace(Settings(), isolation=IsolationSettings(default_mem_mib=1000))
    found = larger_request(request(), ended, [node("n1", mem_mib=65_536)], settings, lambda wish: True)
    assert isinstance(found, LargerRequest)
    assert found.request.mem_mib == 1536
    assert found.text == "1.5G of host memory instead of 1000M"


def test_exhausted_node_memory_and_disabled_growth_change_nothing() -> None:
    machines = [node("n1", mem_mib=65_536, gpus=[gpu_view(0)])]
    asked = request(gpus=1, vram_mib=1000, mem_mib=1000)
    before = replace(run(job(1, request=asked)), gpus=(GpuShare(machines[0].gpus[0].uuid, 0, vram_mib=1000),))
    ended = replace(before, reason=ReasonCode.HOST_OUT_OF_MEMORY)
    assert larger_request(asked, ended, machines, Settings(), lambda wish: True) is None
    off = replace(Settings(), life=LifeSettings(oom_growth=1))
    assert larger_request(asked, replace(before, reason=ReasonCode.MEM_LIMIT), machines, off, lambda wish: True) is None


def test_host_oom_does_not_grow_gpu_memory() -> None:
    machines = [node("n1", mem_mib=65_536, gpus=[gpu_view(0)])]
    asked = request(gpus=1, vram_mib=1000, mem_mib=1024)
    ended = replace(run(job(1, request=asked)), reason=ReasonCode.MEM_LIMIT)
    found = larger_request(asked, ended, machines, Settings(), lambda wish: True)
    assert isinstance(found, LargerRequest)
    assert found.request == replace(asked, mem_mib=1536)


def test_a_job_without_gpus_is_retried_with_more_memory() -> None:
    outcome = SimulatedOutcome(runs_s=1, signal=9, oom_kills=2, mem_limit_mib=1024)
    lab = Lab(gpus=1, outcome=outcome)
    job_id = lab.submit(request=request(mem_mib=1024), retry=RetryRule(retries=1, backoff_s=0))
    for _ in range(6):
        lab.tick(1)
    found = lab.job(job_id)
    story = [event.text for event in lab.store.events(job_id) if event.kind == "retry"]
    assert story == ["retry 1 of 1 in 0.0s, with 1.5G of host memory instead of 1G"]
    assert (found.state, found.reason) == (JobState.OUT_OF_MEMORY, ReasonCode.MEM_LIMIT)
    assert found.spec.request.mem_mib == 1536
