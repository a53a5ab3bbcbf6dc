"""Shares of a card's SMs (`--sm 30%`): who shares a card with whom, how much, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lab import ANN, BOB, Lab

from gpusched.errors import GpuschedError
from gpusched.model.commands import Caller
from gpusched.model.job import Request, Run
from gpusched.model.states import JobState, RunState
from gpusched.testing import request


class SmLab(Lab):
    """A lab whose cards get their control daemons at once, unless they are in `troubles`."""

    def __init__(self, **options: Any) -> None:
        self.troubles: dict[int, str] = {}
        self.unfit: dict[int, str] = {}
        self.is_silent = False
        super().__init__(**options)

    def read(self) -> None:
        self.health = {index: {"why_not_mps": why} for index, why in self.unfit.items()}
        for uuid in self.targets.mps:
            index = int(uuid.removeprefix("GPU-"))
            if index in self.troubles:
                self.health.setdefault(index, {}).update(mps=False, mps_trouble=self.troubles[index])
            elif not self.is_silent:
                self.health.setdefault(index, {}).update(mps=True)
        super().read()

    def ask_for(self, caller: Caller = ANN, **wanted: Any) -> int:
        (answer,) = self.ask(self.submission(caller, request=request(**{"gpus": 1, **wanted})))
        if isinstance(answer, GpuschedError):
            raise answer
        return int(answer["ids"][0])

    def settle(self) -> None:
        for _ in range(4):
            self.tick(0.2)

    def run(self, job_id: int) -> Run | None:
        runs = self.store.runs([job_id])
        return self.scheduler.state.open_runs.get(runs[-1].id, runs[-1]) if runs else None

    def card_of(self, job_id: int) -> int | None:
        run = self.run(job_id)
        return None if run is None else run.gpus[0].index


@pytest.mark.parametrize(
    ("asked", "cards"),
    [
        pytest.param([(ANN, 30), (ANN, 70)], [0, 0], id="two of one user fill a card"),
        pytest.param([(ANN, 30), (ANN, 71)], [0, 1], id="more than all of it goes elsewhere"),
        pytest.param([(ANN, 30), (BOB, 30)], [0, 1], id="another user gets another card"),
        pytest.param([(ANN, 30), (BOB, 30), (ANN, 30)], [0, 1, 0], id="and the first goes on sharing"),
        pytest.param([(ANN, 100), (ANN, 1)], [0, 1], id="all of it leaves nothing"),
        pytest.param([(ANN, 60), (BOB, 60), (ANN, 60)], [0, 1, None], id="a third waits"),
    ],
)
def test_who_shares_a_card(asked: list[tuple[Caller, int]], cards: list[int | None]) -> None:
    lab = SmLab(gpus=2)
    jobs = [lab.ask_for(caller, sm_percent=percent) for caller, percent in asked]
    lab.settle()
    assert [lab.card_of(job) for job in jobs] == cards
    states = [run.state for job in jobs if (run := lab.run(job)) is not None]
    assert set(states) == {RunState.RUNNING}


@pytest.mark.parametrize(
    ("wanted", "vram_mib"),
    [({"sm_percent": 50}, 40704), ({"sm_percent": 50, "vram_mib": 8192}, 8192)],
    ids=["its part of the memory", "a stated amount"],
)
def test_what_is_booked(wanted: dict[str, Any], vram_mib: int) -> None:
    lab = SmLab(gpus=1)
    run = lab.run(lab.ask_for(**wanted))
    assert run is not None
    (share,) = run.gpus
    assert (share.fraction, share.vram_mib, share.limit) == (0.5, vram_mib, "MPS")


def test_memory_and_sms_are_both_booked() -> None:
    lab = SmLab(gpus=1)
    first = lab.ask_for(sm_percent=10, vram_mib=60000)
    second = lab.ask_for(sm_percent=10, vram_mib=60000)
    third = lab.ask_for(sm_percent=90, vram_mib=1000)
    lab.settle()
    assert [lab.card_of(job) for job in (first, second, third)] == [0, None, 0]


def test_a_slice_by_memory_of_the_same_user_may_be_beside_it() -> None:
    lab = SmLab(gpus=1)
    first = lab.ask_for(sm_percent=30, vram_mib=8192)
    second = lab.ask_for(vram_mib=8192)
    other = lab.ask_for(BOB, vram_mib=8192)
    lab.settle()
    assert [lab.card_of(job) for job in (first, second, other)] == [0, 0, None]
    run = lab.run(second)
    assert run is not None
    assert run.gpus[0].limit is None


def test_the_control_daemon_is_wanted_as_long_as_a_run_needs_it() -> None:
    lab = SmLab(gpus=1)
    first = lab.ask_for(sm_percent=30)
    lab.settle()
    lab.tick(5)
    second = lab.ask_for(sm_percent=30)
    assert lab.targets.mps == {"GPU-0": ANN.uid}
    lab.settle()
    lab.tick(5)
    lab.settle()
    assert lab.job(first).state is JobState.COMPLETED
    assert lab.targets.mps == {"GPU-0": ANN.uid}
    lab.tick(10)
    lab.settle()
    assert lab.job(second).state is JobState.COMPLETED
    assert lab.targets.mps == {}


def test_a_run_waits_for_its_control_daemon() -> None:
    lab = SmLab(gpus=1)
    lab.is_silent = True
    job = lab.ask_for(sm_percent=30)
    lab.settle()
    run = lab.run(job)
    assert run is not None
    assert run.state is RunState.STARTING
    lab.is_silent = False
    lab.settle()
    run = lab.run(job)
    assert run is not None
    assert run.state is RunState.RUNNING


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_control_daemon_that_does_not_start_fails_the_run_with_the_reason(is_silent: bool) -> None:
    lab = SmLab(gpus=1)
    lab.is_silent = is_silent
    lab.troubles = {} if is_silent else {0: "nvidia-cuda-mps-control ended with code 1"}
    job = lab.ask_for(sm_percent=30)
    lab.settle()
    lab.tick(25)
    lab.settle()
    found = lab.job(job)
    assert found.state is JobState.FAILED
    why = "no MPS control daemon for GPU 0" + (" within 0:20" if is_silent else ": nvidia-cuda-mps-control ended")
    assert why in (found.reason_text or "")


def test_a_fault_that_ends_two_clients_is_named() -> None:
    from gpusched.addons.simulate.engine import SimulatedOutcome

    lab = SmLab(gpus=1, outcome=SimulatedOutcome(runs_s=10, exit_code=1))
    jobs = [lab.ask_for(sm_percent=30) for _ in range(2)]
    lab.settle()
    lab.tick(15)
    lab.settle()
    texts = [lab.job(job).reason_text or "" for job in jobs]
    assert [lab.job(job).state for job in jobs] == [JobState.FAILED] * 2
    assert any(
        "failed on the same GPU at the same time: under MPS, a fault of one job ends all" in one for one in texts
    )


REFUSED = {
    "pascal": (["MPS limits clients only on GPUs since Volta"] * 2, "MPS limits clients only on GPUs since Volta"),
    "no program": (["nvidia-cuda-mps-control is not installed"] * 2, "nvidia-cuda-mps-control is not installed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_cluster_without_mps_refuses(case: str) -> None:
    whys, text = REFUSED[case]
    lab = SmLab(gpus=2)
    lab.unfit = dict(enumerate(whys))
    lab.tick()
    with pytest.raises(GpuschedError) as caught:
        lab.ask_for(sm_percent=30)
    assert caught.value.message == (
        f"asked for 30 % of the SMs of a GPU; none of these GPUs can be used through MPS: {text}"
    )


def test_cards_without_mps_are_passed_over() -> None:
    lab = SmLab(gpus=2)
    lab.unfit = {0: "MPS limits clients only on GPUs since Volta"}
    lab.tick()
    assert lab.card_of(lab.ask_for(sm_percent=30)) == 1


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"gpus": 2, "sm_percent": 30}, "30 % of the SMs refers to one card, but 2 GPUs were requested"),
        (
            {"gpus": 1, "sm_percent": 30, "gpu_fraction": 0.5},
            "a fraction of a card and 30 % of its SMs cannot be combined",
        ),
        ({"gpus": 0, "sm_percent": 30}, "a share of SMs is requested, but no GPU"),
        ({"gpus": 1, "sm_percent": 30, "vram_mib": 8192}, None),
    ],
)
def test_contradictions(wanted: dict[str, Any], text: str | None) -> None:
    assert Request(**wanted).contradiction() == text


@settings(max_examples=40, deadline=None)
@given(
    asked=st.lists(
        st.tuples(
            st.sampled_from([ANN, BOB]),
            st.one_of(st.none(), st.integers(1, 100)),
            st.one_of(st.none(), st.integers(1, 80)),
            st.integers(0, 12),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_sums_never_exceed_a_card_and_no_two_users_share_one(
    asked: list[tuple[Caller, int | None, int | None, int]],
) -> None:
    lab = SmLab(gpus=2)
    for caller, percent, gib, seconds in asked:
        wanted = {"sm_percent": percent, "vram_mib": None if gib is None else gib * 1024}
        try:
            lab.ask_for(caller, **wanted)
        except GpuschedError:
            continue
        lab.tick(seconds)
        booked: dict[str, list[tuple[int, float, int | None]]] = {}
        for run in lab.scheduler.state.open_runs.values():
            for share in run.gpus:
                uid = lab.scheduler.state.jobs[run.job_id].uid
                part = 1.0 if share.is_whole else share.fraction or 0.0
                booked.setdefault(share.uuid, []).append((uid, part, share.vram_mib))
        for uuid, shares in booked.items():
            assert len({uid for uid, _, _ in shares}) == 1
            assert sum(part for _, part, _ in shares) <= 1.0 + 1e-9
            assert sum(mib or 0 for _, _, mib in shares) <= 81920
            if uuid in lab.targets.mps:
                assert {uid for uid, _, _ in shares} == {lab.targets.mps[uuid]}
