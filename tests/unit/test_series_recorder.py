"""What the daemon records over time, and who may ask for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request
from answering import answering
from lab import ANN, BOB, ROOT, Caller, Lab

from gpusched.api import visibility
from gpusched.api.handlers import series as handler
from gpusched.api.server import build_app
from gpusched.api.service import ApiService
from gpusched.daemon.facade import DaemonFacade
from gpusched.daemon.nodes import ClusterNode
from gpusched.daemon.watch.series import SeriesRecorder
from gpusched.errors import NotFound, UsageError
from gpusched.gpu.energy import COUNTER, CardEnergy
from gpusched.model.cluster import GpuReading
from gpusched.model.settings import AccessSettings
from gpusched.model.value import replace
from gpusched.store.series import SeriesFile
from gpusched.testing import request

Ask = Callable[..., list[dict[str, Any]]]


class Site:
    """A scheduler whose series are recorded, and requests to it."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, **parts: Any) -> None:
        self.lab = Lab(**parts)
        self.path = str(path)
        self.monkeypatch = monkeypatch
        self.recorder = SeriesRecorder(self.lab.scheduler, SeriesFile(self.path))

    def restart(self) -> None:
        self.lab.restart()
        self.recorder = SeriesRecorder(self.lab.scheduler, SeriesFile(self.path))

    def run(self, seconds: int, step_s: float = 1.0) -> None:
        for _ in range(int(seconds / step_s)):
            self.lab.tick(step_s)
            self.recorder.poll()

    def get(self, query: str, caller: Caller = ROOT) -> list[dict[str, Any]]:
        app = build_app(ApiService(DaemonFacade(self.lab.ticker, series=self.recorder)))
        self.monkeypatch.setattr(visibility, "caller_of", lambda request: caller)
        response = asyncio.run(answering(handler.show)(make_mocked_request("GET", f"/v1/series?{query}", app=app)))
        assert isinstance(getattr(response, "body", None), bytes)
        found: list[dict[str, Any]] = json.loads(response.body)["series"]  # type: ignore[attr-defined]
        return found


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Site]:
    return lambda **parts: Site(tmp_path / "series.db", monkeypatch, **parts)


def known(values: list[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def test_the_last_minutes_have_a_sample_a_second(site: Callable[..., Site]) -> None:
    one = site(gpus=2)
    one.lab.load[0] = 0.5
    one.run(120)
    busy, idle = one.get("cards=all&from=-60")
    assert (busy["index"], busy["step_s"], len(busy["use"])) == (0, 1, 60)
    assert set(known(busy["use"])) == {0.5}
    assert set(known(idle["use"])) == {0.0}
    assert known(busy["energy_j"]) == [], "these cards tell no power: unknown is not 0"


def test_a_reading_just_after_another_is_no_sample_and_its_energy_counts_in_the_next(
    site: Callable[..., Site],
) -> None:
    one = site(gpus=1)
    seen: list[tuple[ClusterNode, GpuReading]] = []
    one.lab.scheduler.signals.gpus_read.connect(lambda node, reading: seen.append((node, reading)))
    one.run(2)
    node, reading = seen[-1]
    (card,) = reading.gpus
    for after_s, utilisation, joules in ((1.0, 0.25, 10.0), (1.1, 0.75, 5.0), (2.0, 0.5, 7.0)):
        node.tracker.card_energies = {card.uuid: CardEnergy(joules, COUNTER, 1.0, reading.at)}
        sample = replace(card, utilisation=utilisation)
        one.recorder.observed(node, replace(reading, at=reading.at + after_s, gpus=(sample,)))
    one.lab.clock.advance(10)
    (found,) = one.get("cards=0&from=-15&fields=use,energy_j")
    assert known(found["use"])[-2:] == [0.25, 0.5]
    assert known(found["energy_j"]) == [10.0, 12.0]


def test_a_long_time_comes_in_a_bounded_number_of_points(site: Callable[..., Site]) -> None:
    one = site(gpus=1)
    one.run(6 * 3600, step_s=60)
    for query, base_s in (("from=-21600", 60), ("from=-2592000", 600), ("from=-31536000", 600)):
        (found,) = one.get(f"cards=0&points=100&fields=use&{query}")
        assert len(found["use"]) <= 100
        assert found["step_s"] % base_s == 0
        assert 0.0 in found["use"]


def test_a_restart_loses_at_most_the_current_minute(site: Callable[..., Site]) -> None:
    one = site(gpus=1)
    one.lab.load[0] = 0.75
    one.run(630)
    one.restart()
    one.run(60)
    (found,) = one.get("cards=0&from=-690&points=20&fields=use")
    assert found["step_s"] == 60
    assert len(known(found["use"])) >= 11


@pytest.mark.parametrize("step_s", [-7200.0, 86400.0 * 30])
def test_a_step_of_the_clock_breaks_nothing(step_s: float, site: Callable[..., Site]) -> None:
    one = site(gpus=1)
    one.run(180)
    one.lab.tick(step_s)
    one.run(180)
    (found,) = one.get("cards=0&from=-100&fields=use")
    assert 0.0 in found["use"]
    assert not one.lab.scheduler.failures.failing


def test_queues_count_what_runs_waits_and_is_held(site: Callable[..., Site]) -> None:
    one = site(gpus=2)
    one.lab.outcome = one.lab.outcome.__class__(runs_s=1000)
    for hold in (False, False, False, True):
        one.lab.submit(request=request(gpus=1), hold=hold)
    one.run(120)
    whole, queue = one.get("queues=all&from=-30")
    assert (whole["queue"], queue["queue"]) == (None, "default")
    for row in (whole, queue):
        last = {name: known(row[name])[-1] for name in ("running", "pending", "held", "gpus_held")}
        assert last == {"running": 2, "pending": 1, "held": 1, "gpus_held": 2}
    assert known(whole["gpus_idle"])[-1] == 0


def test_a_run_has_a_curve_also_after_its_end(site: Callable[..., Site]) -> None:
    one = site(gpus=2)
    one.lab.load[0] = 0.9
    one.lab.outcome = one.lab.outcome.__class__(runs_s=200)
    job = one.lab.submit(request=request(gpus=2))
    one.run(100)
    first, second = one.get(f"job={job}")
    assert (first["index"], second["index"], first["run"]) == (0, 1, 1)
    assert set(known(first["use"])) == {0.9}
    one.run(300)
    assert len(one.get(f"job={job}")) == 2
    one.restart()
    first, _ = one.get(f"job={job}&run=1&points=10&fields=use")
    assert len(first["use"]) <= 10
    assert first["start_at"] < one.lab.clock.now() - 300


def test_a_curve_of_an_open_run_goes_on_after_a_restart(site: Callable[..., Site]) -> None:
    one = site(gpus=1)
    one.lab.outcome = one.lab.outcome.__class__(runs_s=10_000)
    job = one.lab.submit(request=request(gpus=1))
    one.run(200)
    (before,) = one.get(f"job={job}")
    one.restart()
    one.run(100)
    (after,) = one.get(f"job={job}")
    assert after["start_at"] == before["start_at"]
    assert len(after["use"]) * after["step_s"] >= 300


def test_who_held_a_card_obeys_private_data(site: Callable[..., Site]) -> None:
    one = site(gpus=1, access=AccessSettings(private_data=("jobs",)))
    one.lab.outcome = one.lab.outcome.__class__(runs_s=10_000)
    job = one.lab.submit(request=request(gpus=1))
    one.run(100)
    for caller, holder in ((ANN, str(job)), (ROOT, str(job)), (BOB, None)):
        (card,) = one.get("cards=0&from=-50&holders=1", caller)
        assert 0.0 in card["use"], "the curve of a card is for all"
        assert [row["job"] for row in card["holders"]] == [holder]
        assert (card["holders"][0]["user"] is None) is (holder is None)
        assert card["holders"][0]["end_at"] is None
    with pytest.raises(NotFound):
        one.get(f"job={job}", BOB)
    whole, queue = one.get("queues=all", BOB)
    assert known(whole["pending"]) == known(queue["gpus_held"]) == []
    assert known(whole["gpus_held"])[-1] == 1


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("cards=all&queues=all", "cards, queues and job exclude each other"),
        ("cards=all&points=0", "points is '0'"),
        ("cards=all&points=99999", "points is '99999'"),
        ("cards=all&points=x", "points is 'x'"),
        ("cards=all&from=x", "from is 'x'"),
        ("cards=all&from=nan", "from is 'nan'"),
        ("cards=all&from=9&to=1", "from must be before to"),
        ("cards=all&from=-99999999", "kept for a year"),
        ("cards=all&fields=use,colour", "there is no field 'colour'"),
        ("cards=all&colour=red", "unknown parameter 'colour'"),
        ("job=1&run=7", "run is 7; job 1 has runs"),
        ("job=1&run=x", "run is 'x'"),
    ],
)
def test_a_wrong_question_is_refused(query: str, sentence: str, site: Callable[..., Site]) -> None:
    one = site(gpus=1)
    one.lab.submit()
    with pytest.raises(UsageError, match=sentence.replace("(", "\\(")):
        one.get(query)


@pytest.mark.parametrize(
    ("query", "sentence"), [("cards=7", "no GPU '7'"), ("queues=x", "queue 'x'"), ("job=99", "99")]
)
def test_what_is_not_there_is_not_found(query: str, sentence: str, site: Callable[..., Site]) -> None:
    with pytest.raises(NotFound, match=sentence):
        site(gpus=1).get(query)
