"""Jobs that wait for cheap or clean energy: when they start, and why they wait."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab import ANN, Lab

from gpusched.errors import Refused
from gpusched.model.commands import Update
from gpusched.model.states import JobState
from gpusched.model.tariff import Tariff, TariffRow
from gpusched.scheduler.cheap import cheapest_start
from gpusched.testing import request

HOUR = 3600


def hourly(*prices: float | None, start: float = 0.0, **fixed: Any) -> Tariff:
    """A price each hour; the grams are the other way round."""
    rows = tuple(
        TariffRow(start + hour * HOUR, price, None if price is None else 1000 - 1000 * price)
        for hour, price in enumerate(prices)
    )
    return Tariff(rows=rows, end_at=start + len(prices) * HOUR, **fixed)


@pytest.mark.parametrize(
    ("prices", "earliest_h", "run_h", "latest_h", "expected_h"),
    [
        pytest.param((0.3, 0.1, 0.3), 0, 1, 2, 1, id="the cheapest hour"),
        pytest.param((0.1, 0.3, 0.1), 0, 1, 2, 0, id="of equal ones the first"),
        pytest.param((0.3, 0.2, 0.1), 0, 1, 1, 1, id="not after the last start"),
        pytest.param((0.3, 0.2, 0.1), 0, 1, 1.5, 1.5, id="the last start may be best"),
        pytest.param((0.3, 0.1, 0.2, 0.3), 0, 2, 2, 1, id="a run over two hours"),
        pytest.param((0.3, 0.2, 0.1, 0.3), 0, 1.5, 2.5, 1.5, id="a run that ends as the price rises"),
        pytest.param((0.3, -0.1, 0.1), 0, 1, 2, 1, id="a negative price"),
        pytest.param((0.1, 0.35, 0.2), 0.5, 1, 2, 2, id="half of a cheap hour is not worth it"),
        pytest.param((0.1, 0.35, 0.2), 0.25, 1, 2, 0.25, id="three quarters are"),
        pytest.param((0.3, None, 0.2), 0, 1, 2, 2, id="an unknown hour is left out"),
        pytest.param((None, 0.3), 0, 1, 1, 1, id="an unknown start"),
        pytest.param((None, None), 0, 1, 1, 0, id="nothing known: at once"),
        pytest.param((0.3, 0.1), 0, 1, 5, 1, id="beyond the tariff nothing is known"),
        pytest.param((0.3, 0.1), 1, 2, 0, 1, id="too late: at once"),
        pytest.param((0.2, 0.2, 0.2), 0, 1, 2, 0, id="a flat price: at once"),
    ],
)
def test_the_cheapest_start(
    prices: tuple[float | None, ...], earliest_h: float, run_h: float, latest_h: float, expected_h: float
) -> None:
    found = cheapest_start(hourly(*prices), earliest_h * HOUR, run_h * HOUR, latest_h * HOUR, "cheap")
    assert found == expected_h * HOUR


@given(
    st.lists(st.integers(-5, 50), min_size=1, max_size=12),
    st.floats(0, 4),
    st.floats(0.1, 4),
    st.floats(0, 8),
    st.sampled_from(["cheap", "green"]),
)
def test_no_other_start_is_cheaper(cents: list[int], earliest_h: float, run_h: float, slack_h: float, by: str) -> None:
    tariff = hourly(*(cent / 100 for cent in cents), price_per_kwh=0.3, g_per_kwh=300)
    earliest, run_s, latest = earliest_h * HOUR, run_h * HOUR, (earliest_h + slack_h) * HOUR
    at = 0 if by == "cheap" else 1
    best = cheapest_start(tariff, earliest, run_s, latest, by)
    assert earliest <= best <= max(latest, earliest)
    cost = tariff.charge(best, best + run_s, 3.6e6)[at]
    assert cost is not None
    for part in range(21):
        start = earliest + (latest - earliest) * part / 20
        other = tariff.charge(start, start + run_s, 3.6e6)[at]
        assert other is not None
        assert cost <= other + 1e-6 * max(1.0, abs(other))


class Site:
    def __init__(self, *prices: float | None, gpus: int = 1) -> None:
        self.lab = Lab(gpus=gpus)
        self.began_at = self.lab.clock.now()
        if prices:
            self.lab.scheduler.use_tariff(hourly(*prices, start=self.began_at), None)

    def submit(self, deadline_h: float = 6, limit_h: float | None = 1, when: str = "cheap", **parts: Any) -> int:
        known = {
            "request": request(gpus=1),
            "start_when": when,
            "deadline_at": self.began_at + deadline_h * HOUR,
            "time_limit_s": None if limit_h is None else int(limit_h * HOUR),
        }
        return self.lab.submit(**{**known, **parts})

    def to(self, hours: float) -> None:
        """Let time pass, a minute a tick."""
        while self.lab.clock.now() < self.began_at + hours * HOUR - 1:
            self.lab.tick(60)

    def started_h(self, job_id: int) -> float | None:
        start_at = self.lab.job(job_id).start_at
        return None if start_at is None else round((start_at - self.began_at) / HOUR, 1)


@pytest.mark.parametrize(("when", "start_h"), [("cheap", 2.0), ("green", 0.0)])
def test_a_job_starts_in_its_window(when: str, start_h: float) -> None:
    site = Site(0.4, 0.3, 0.1, 0.4)
    job = site.submit(when=when, deadline_h=4)
    if start_h:
        reason = site.lab.scheduler.answers.reason_for(site.lab.job(job))
        assert reason is not None
        assert (reason.code, reason.text) == (
            "CheapEnergy",
            "begins in 2:00:00, when its energy is cheapest before its deadline",
        )
        assert reason.facts["eligible_at"] == site.began_at + start_h * HOUR
    site.to(3)
    assert site.started_h(job) == start_h


def test_a_window_that_passes_while_gpus_are_busy_is_followed_by_the_next() -> None:
    site = Site(0.4, 0.1, 0.4, 0.2, 0.4, 0.4)
    site.lab.outcome = site.lab.outcome.__class__(runs_s=1.9 * HOUR)
    site.lab.submit(request=request(gpus=1))
    job = site.submit()
    site.to(1.8)
    assert site.started_h(job) is None
    site.to(3.5)
    assert site.started_h(job) == 3.0
    texts = [event.text for event in site.lab.store.events(job)]
    assert any("put off by" in text and "when its energy is best" in text for text in texts)


def test_the_deadline_forces_the_start() -> None:
    site = Site(0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    site.lab.outcome = site.lab.outcome.__class__(runs_s=2.5 * HOUR)
    site.lab.submit(request=request(gpus=1))
    job = site.submit(deadline_h=4)
    site.to(2.9)
    # Prices rise: once the GPU is free, starting at once is the best that is left.
    assert site.started_h(job) == 2.5


def test_a_new_tariff_moves_the_start() -> None:
    site = Site(0.4, 0.3, 0.1, 0.4, 0.4, 0.4)
    job = site.submit()
    site.lab.scheduler.use_tariff(hourly(0.4, 0.1, 0.3, 0.4, start=site.began_at), None)
    site.to(1.5)
    assert site.started_h(job) == 1.0


def update(site: Site, job: int, **changes: Any) -> Any:
    (answer,) = site.lab.ask(Update(ANN, (job,), changes))
    return answer


def test_an_update_of_the_deadline_moves_the_start() -> None:
    site = Site(0.4, 0.3, 0.1, 0.4, 0.4, 0.4)
    job = site.submit()
    update(site, job, deadline_at=site.began_at + 2 * HOUR)
    site.to(1.5)
    assert site.started_h(job) == 1.0


def test_a_deadline_cannot_be_taken_from_a_job_that_waits_for_prices() -> None:
    site = Site(0.4, 0.3, 0.1)
    job = site.submit(deadline_h=3)
    assert "needs a deadline" in update(site, job, deadline_at=None).message


def test_a_held_job_is_left_alone_and_starts_after_its_release() -> None:
    site = Site(0.1, 0.4)
    job = site.submit(hold=True, deadline_h=2)
    site.to(0.2)
    assert site.lab.job(job).state is JobState.PENDING


@pytest.mark.parametrize(
    ("prices", "parts", "sentence"),
    [
        ((), {}, "no prices of energy over time are known here"),
        ((None,), {}, "no prices of energy over time are known here"),
        ((None,), {"when": "green"}, "no emissions of energy over time are known here"),
        ((0.1,), {"deadline_at": None}, "--start-when cheap needs a deadline, or the job might wait forever"),
        ((0.1,), {"limit_h": None}, "--start-when cheap needs a time limit: how long the job runs decides when"),
        ((0.1,), {"reservation": "course"}, "course"),
        ((0.1,), {"deadline_h": 0.5}, "the job may run 1:00:00, but its deadline is 30:00 after it could start"),
    ],
)
def test_a_job_that_cannot_wait_is_refused(prices: Any, parts: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Refused) as caught:
        Site(*prices).submit(**parts)
    assert sentence in caught.value.message
    assert caught.value.hint
