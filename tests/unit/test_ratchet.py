"""The hot paths are no dearer than recorded, in counted function calls; and a path that became dearer is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import ratchet
from benchmarks.counted import calls_of, slots
from gpusched.daemon.tick import Ticker

JOBS = 16
RECORDED = ratchet.records().get(ratchet.VERSION, {})


@pytest.mark.skipif(not RECORDED, reason=f"no function calls are recorded for Python {ratchet.VERSION}")
def test_no_hot_path_is_dearer_or_cheaper_than_its_record() -> None:
    found, _ = ratchet.measure()
    problems = ratchet.findings(found, RECORDED)
    assert not problems, "\n".join(problems)


def test_a_fifth_more_calls_in_a_tick_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tick, ticks = Ticker.tick, 0

    def submissions() -> float:
        with slots() as one:
            return calls_of(lambda: one.submit(JOBS)).total() / JOBS

    def nothing() -> None:
        """A call."""

    def dearer(ticker: Ticker) -> None:
        nonlocal ticks
        ticks += 1
        for _ in range(int(before / 5)):
            nothing()
        tick(ticker)

    before = submissions()
    assert not ratchet.findings({"a job": submissions()}, {"a job": before}), "equal work costs as many calls"
    monkeypatch.setattr(Ticker, "tick", dearer)
    (problem,) = ratchet.findings({"a job": submissions()}, {"a job": before})
    assert ticks
    assert problem.startswith("a job: ")
    assert f"20% above its record of {before:,.1f}" in problem
    assert problem.endswith('see where with: python -m benchmarks ratchet --where "a job"')


def test_what_was_won_is_to_be_kept_and_every_figure_has_a_record() -> None:
    found = {"cheaper": 80.0, "new": 5.0, "equal": 100.0}
    recorded = {"cheaper": 100.0, "equal": 99.0, "gone": 7.0}
    cheaper, new, gone = ratchet.findings(found, recorded)
    assert cheaper.startswith("cheaper: 80.0, 20% below its record of 100.0; keep what was won")
    assert new.startswith("new: it has no record")
    assert gone.startswith("gone: it is recorded and not counted")
    assert ratchet.tightened(found, recorded) == {"cheaper": 80.0, "new": 5.0, "equal": 99.0}
    assert not ratchet.findings(found, ratchet.tightened(found, recorded))


def test_tightening_lowers_records_and_raises_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ratchet.json"
    path.write_text(f'{{"{ratchet.VERSION}": {{"dearer": 100, "cheaper": 100}}, "2.7": {{"dearer": 1}}}}')
    monkeypatch.setattr(ratchet, "RECORDS", path)
    monkeypatch.setattr(ratchet, "measure", lambda where="": ({"dearer": 120.0, "cheaper": 70.0}, []))
    assert ratchet.main(["--tighten"]) == 1
    assert "dearer: 120.0, 20% above its record of 100.0" in capsys.readouterr().out
    assert ratchet.records() == {ratchet.VERSION: {"dearer": 100, "cheaper": 70.0}, "2.7": {"dearer": 1}}
