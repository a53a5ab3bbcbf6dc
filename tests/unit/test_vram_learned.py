"""How much VRAM earlier runs used: what is remembered, and what is proposed for the next."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.daemon.watch.history import History
from gpusched.model.job import Job, Run
from gpusched.model.settings import GpuSettings
from gpusched.model.snapshot import VramSeen
from gpusched.model.states import JobState, RunState
from gpusched.ports import Changes
from gpusched.predict.family import largest_peak, peak_vram_mib
from gpusched.scheduler.whatif import vram_advice, vram_seen
from gpusched.store.sqlite import SqliteStore
from gpusched.testing import NOW, gpu_view, job, launch, request, run, share

SETTINGS = GpuSettings()
CARDS = [gpu_view(0), gpu_view(1, vram_total_mib=80 * 1024, name="NVIDIA H100")]


def ended(of: Job, peak_mib: int | None, *, cards: int = 1, outcome: JobState = JobState.COMPLETED) -> Run:
    fields = {"outcome": outcome, "peak_vram_mib": peak_mib, "start_at": NOW - 60, "end_at": NOW}
    return run(of, state=RunState.ENDED, gpus=tuple(share(card) for card in range(cards)), **fields)


@pytest.mark.parametrize(
    ("peak_mib", "cards", "outcome", "expected"),
    [
        (6000, 1, JobState.COMPLETED, 6000),
        (6001, 2, JobState.COMPLETED, 3001),
        (None, 1, JobState.COMPLETED, None),
        (6000, 0, JobState.COMPLETED, None),
        (6000, 1, JobState.FAILED, None),
        (6000, 1, JobState.OUT_OF_MEMORY, None),
    ],
)
def test_a_run_reveals_its_vram_use(peak_mib: int | None, cards: int, outcome: JobState, expected: int | None) -> None:
    assert peak_vram_mib(ended(job(1), peak_mib, cards=cards, outcome=outcome)) == expected


@pytest.mark.parametrize(
    ("peaks", "expected"),
    [
        ([], None),
        ([1, 2], None),
        ([1, 3, 2], VramSeen(3, 3)),
        ([9, 1, 2, 3, 4, 5], VramSeen(5, 5)),
    ],
)
def test_the_newest_runs_determine_the_estimate(peaks: list[int], expected: VramSeen | None) -> None:
    assert largest_peak(peaks) == expected


def test_the_estimate_is_described_in_words() -> None:
    assert vram_seen(request(gpus=1), VramSeen(5, 6246)) == "its last 5 runs peaked at 6.1G of VRAM"
    assert vram_seen(request(gpus=2), VramSeen(3, 6246)) == "its last 3 runs peaked at 6.1G of VRAM on each GPU"


GIB = 1024
PROPOSALS: dict[str, tuple[dict[str, Any], float, str | None]] = {
    # request, peak in GiB, proposal
    "a slice that is about right": ({"gpus": 1, "vram_mib": 8 * GIB}, 6.1, None),
    "a slice that is far too large": ({"gpus": 1, "vram_mib": 20 * GIB}, 6.1, "--vram 8G would do"),
    "a slice that is too small": (
        {"gpus": 1, "vram_mib": 4 * GIB},
        6.1,
        "that is more than the 4G it books: ask for --vram 8G",
    ),
    "a slice that is over by a context": ({"gpus": 1, "vram_mib": 6 * GIB}, 6.4, None),
    "a whole card for little": (
        {"gpus": 1},
        6.1,
        "--vram 8G would do, and shares a card with others of yours",
    ),
    "a whole card for half of it": ({"gpus": 1}, 10.0, None),
    "a large card by type": (
        {"gpus": 1, "gpu_type": "h100"},
        10.0,
        "--vram 13G would do, and shares a card with others of yours",
    ),
    "a large card by memory": (
        {"gpus": 1, "min_vram_mib": 40 * GIB},
        10.0,
        "--vram 13G would do, and shares a card with others of yours",
    ),
    "two cards": ({"gpus": 2}, 1.0, None),
    "a fraction": ({"gpus": 1, "gpu_fraction": 0.5}, 1.0, None),
    "next to nothing": ({"gpus": 1}, 0.0, "--vram 1G would do, and shares a card with others of yours"),
}


@pytest.mark.parametrize("name", PROPOSALS)
def test_a_vram_request_is_proposed(name: str) -> None:
    asked, peak_gib, expected = PROPOSALS[name]
    assert vram_advice(request(**asked), VramSeen(5, int(peak_gib * GIB)), CARDS, SETTINGS) == expected


def test_no_request_is_proposed_without_sharing_or_a_known_size() -> None:
    for cards in (
        [],
        [gpu_view(0, can_share=False)],
        [gpu_view(0, vram_total_mib=None)],
        [gpu_view(0, is_present=False)],
    ):
        assert vram_advice(request(gpus=1), VramSeen(5, 100), cards, SETTINGS) is None


@given(st.integers(0, 200_000), st.integers(256, 100_000))
def test_the_proposed_request_covers_the_observed_use(peak_mib: int, booked_mib: int) -> None:
    text = vram_advice(request(gpus=1, vram_mib=booked_mib), VramSeen(5, peak_mib), CARDS, SETTINGS)
    if text is not None:
        (word,) = [word for word in text.split() if word.endswith("G") and text.split("--vram ")[1].startswith(word)]
        assert float(word[:-1]) * GIB >= peak_mib


def a_job(number: int, name: str = "train.sh", **parts: Any) -> Job:
    state = {"state": JobState.COMPLETED, "run": 1, "end_at": NOW}
    return job(number, request=request(gpus=1), launch=launch(name), **{**state, **parts})


def test_the_history_is_read_once_and_kept_up_to_date() -> None:
    store = SqliteStore.in_memory()
    changes = Changes()
    for number, peak_mib in enumerate((5000, 7000, 6000, None), start=1):
        one = a_job(number)
        changes.jobs[number] = one
        changes.runs[f"{number}.1"] = ended(one, peak_mib)
    store.commit(changes)
    history = History(store)
    assert history.vram_seen(a_job(9)) is None
    history.load()
    assert history.vram_seen(a_job(9)) == VramSeen(3, 7000)
    assert history.vram_seen(a_job(9, "other.sh")) is None
    assert history.vram_seen(a_job(9, user="bob")) is None
    for number, peak_mib in ((10, 1000), (11, 1100), (12, 1200), (13, 1300)):
        history.learn(a_job(number), ended(a_job(number), peak_mib))
    assert history.vram_seen(a_job(14)) == VramSeen(5, 6000)
