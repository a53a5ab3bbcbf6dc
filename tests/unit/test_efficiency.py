"""What a job used of what it asked for, and the advice that follows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab import Lab

from gpusched.model.job import Alerting, Job, MeasuredCard, Run, RunMeasures, TaskLayout
from gpusched.model.snapshot import VramSeen
from gpusched.model.states import JobState, RunState
from gpusched.model.value import replace
from gpusched.predict.efficiency import EndReport, end_report, report_lines
from gpusched.predict.limits import LimitAdvice
from gpusched.testing import job as new_job
from gpusched.testing import request

GIB = 1024
HOUR = 3600.0


def card(index: int = 0, use: float | None = 0.97, peak_gib: float | None = 71, **parts: Any) -> MeasuredCard:
    peak_mib = None if peak_gib is None else int(peak_gib * GIB)
    known: dict[str, Any] = {"vram_mib": 80 * GIB, "mean_power_w": 388.0, "power_limit_w": 400.0}
    return MeasuredCard(f"GPU-{index}", index, use, peak_mib, **{**known, **parts})


def run(hours: float = 3.0, number: int = 1, cards: tuple[MeasuredCard, ...] = (), **parts: Any) -> Run:
    start_at = 10_000.0 + number * 100_000.0
    measured = RunMeasures(cards, 120.0, "counter", 0.53, "EUR", 720.0) if cards else None
    known: dict[str, Any] = {
        "cpu_s": 3.1 * hours * HOUR,
        "cpus": 16.0,
        "mem_mib": 64 * GIB,
        "peak_mem_mib": 22.0 * GIB,
        "energy_j": 1.9 * 3.6e6 if cards else None,
        "measured": measured,
        "gpus": (),
    }
    return Run(
        job_id=42,
        number=number,
        state=RunState.ENDED,
        node="lab1",
        boot_id="b",
        intent_at=start_at,
        start_at=start_at,
        end_at=start_at + hours * HOUR,
        outcome=JobState.COMPLETED,
        **{**known, **parts},
    )


def ended(limit_h: float | None = 12, state: JobState = JobState.COMPLETED, gpus: int = 1, **spec: Any) -> Job:
    limit_s = None if limit_h is None else int(limit_h * HOUR)
    made = new_job(42, **{"request": request(gpus, cpus=16), "time_limit_s": limit_s, **spec})
    return replace(made, state=state, end_at=1e6, run=1)


def options(job: Job, *runs: Run, **known: Any) -> list[str]:
    found = end_report(job, runs, **known)
    assert found is not None
    return [one.option for one in found.advice]


SEEN = VramSeen(5, 10 * GIB)
LONG = LimitAdvice(int(7 * HOUR), 1.0, 5, "", "")
LIMIT = LimitAdvice(int(5 * HOUR), 3.2 * HOUR, 5, "why", "95 % of 34 jobs like it took at most 3:20:00")


@pytest.mark.parametrize(
    ("job", "runs", "known", "expected"),
    [
        pytest.param(ended(), [run(cards=(card(),))], {}, ["-c 5", "-t 4h30m"], id="the design's example"),
        pytest.param(ended(), [run(cards=(card(),))], {"limit": LIMIT}, ["-c 5", "-t 5h"], id="what others needed"),
        pytest.param(
            ended(),
            [run(cards=(card(),))],
            {"limit": LimitAdvice(int(7 * HOUR), 1, 5, "", "")},
            ["-c 5"],
            id="others: 7 h",
        ),
        pytest.param(ended(), [run(5.0, cards=(card(),))], {}, ["-c 5"], id="half of the limit is no waste"),
        pytest.param(ended(None), [run(cards=(card(),))], {}, ["-c 5"], id="no limit"),
        pytest.param(
            ended(time_limit_source="default"), [run(cards=(card(),))], {}, ["-c 5"], id="a limit that nobody typed"
        ),
        pytest.param(ended(), [run(cards=(card(),), cpu_s=None)], {}, ["-t 4h30m"], id="cores unknown"),
        pytest.param(ended(), [run(cards=(card(),), cpu_s=6 * 3 * HOUR)], {}, ["-t 4h30m"], id="six cores busy of 16"),
        pytest.param(
            ended(), [run(cpu_s=9 * 3 * HOUR), run(number=2)], {}, ["-t 4h30m"], id="an earlier run needed the cores"
        ),
        pytest.param(ended(), [run(9.0), run(0.2, number=2)], {}, ["-c 5"], id="an earlier run needed the time"),
        pytest.param(ended(state=JobState.FAILED), [run()], {}, [], id="a failed job"),
        pytest.param(ended(state=JobState.OUT_OF_MEMORY), [run()], {}, [], id="one out of memory"),
        pytest.param(ended(state=JobState.TIMEOUT), [run()], {}, [], id="one at its limit"),
        pytest.param(ended(), [run(0.05)], {}, [], id="three minutes tell nothing"),
        pytest.param(
            ended(layout=TaskLayout(ntasks=4)), [run(cards=(card(),))], {}, ["-t 4h30m"], id="tasks count on cores"
        ),
        pytest.param(
            ended(),
            [run(cards=(card(use=0.2, peak_gib=8),))],
            {"vram_seen": SEEN},
            ["--vram 13G", "-c 5", "-t 4h30m"],
            id="VRAM",
        ),
        pytest.param(
            ended(), [run(cards=(card(use=0.2, peak_gib=8),))], {}, ["-c 5", "-t 4h30m"], id="VRAM of one run"
        ),
        pytest.param(
            ended(),
            [run(cards=(card(use=0.2, peak_gib=40),))],
            {"vram_seen": SEEN},
            ["-c 5", "-t 4h30m"],
            id="half full",
        ),
        pytest.param(
            ended(),
            [run(cards=(card(use=0.2, peak_gib=8),))],
            {"vram_seen": VramSeen(5, 60 * GIB)},
            ["-c 5", "-t 4h30m"],
            id="jobs like it needed more",
        ),
        pytest.param(
            ended(),
            [run(cards=(card(use=0.2, peak_gib=None),))],
            {"vram_seen": SEEN},
            ["-c 5", "-t 4h30m"],
            id="VRAM n/a",
        ),
        pytest.param(
            ended(),
            [run(cards=(card(use=None, peak_gib=8),))],
            {"vram_seen": SEEN},
            ["-c 5", "-t 4h30m"],
            id="MIG: use n/a",
        ),
        pytest.param(
            ended(gpus=4),
            [run(cards=(card(0), card(1), card(2, 0.0, 0.4), card(3, 0.0, 0)))],
            {},
            ["-g 2", "-c 5", "-t 4h30m"],
            id="two GPUs did nothing",
        ),
        pytest.param(
            ended(gpus=2), [run(cards=(card(0), card(1, 0.0, 30)))], {}, ["-c 5", "-t 4h30m"], id="idle but not empty"
        ),
        pytest.param(
            ended(gpus=2), [run(cards=(card(0), card(1, 0.0, None)))], {}, ["-c 5", "-t 4h30m"], id="empty is not known"
        ),
        pytest.param(
            ended(gpus=2), [run(cards=(card(0, 0, 0), card(1, 0, 0)))], {}, ["-c 5", "-t 4h30m"], id="all did nothing"
        ),
    ],
)
def test_advice(job: Job, runs: list[Run], known: dict[str, Any], expected: list[str]) -> None:
    assert options(job, *runs, **known) == expected


@pytest.mark.parametrize(
    ("job", "one", "waste"),
    [
        pytest.param(
            ended(6),
            run(cards=(card(use=0.1, peak_gib=8),)),
            "its 1 GPU was busy for 10% of 3:00:00 and at most 10% full",
            id="idle",
        ),
        pytest.param(
            ended(6, gpus=2),
            run(0.6, cards=(card(0, 0.1, 8), card(1, 0.0, 0))),
            "its 2 GPUs were busy for 5% of 36:00 and at most 10% full",
            id="two GPUs make an hour",
        ),
        pytest.param(ended(3), run(0.9, cards=(card(use=0.1, peak_gib=8),)), None, id="less than a GPU-hour"),
        pytest.param(ended(6), run(cards=(card(use=0.15, peak_gib=8),)), None, id="15 % is enough"),
        pytest.param(ended(6), run(cards=(card(use=0.1, peak_gib=40),)), None, id="memory-heavy"),
        pytest.param(ended(6), run(cards=(card(use=None, peak_gib=8),)), None, id="MIG: use n/a"),
        pytest.param(ended(6), run(cards=(card(use=0.1, peak_gib=None),)), None, id="memory n/a"),
        pytest.param(ended(16), run(cards=(card(),)), "it ran for 3:00:00 of a time limit of 16:00:00", id="limit"),
        pytest.param(ended(15), run(cards=(card(),)), None, id="five times is allowed"),
        pytest.param(ended(100), run(), None, id="no GPU"),
        pytest.param(ended(100, JobState.CANCELLED), run(cards=(card(),)), None, id="cancelled early"),
        pytest.param(ended(100, time_limit_source="default"), run(cards=(card(),)), None, id="nobody typed it"),
    ],
)
def test_waste(job: Job, one: Run, waste: str | None) -> None:
    found = end_report(job, [one])
    assert found is not None
    assert found.waste == waste


def test_the_report_of_the_design() -> None:
    gpus = tuple(share for share in new_shares(2))
    cards = (card(0, 0.97, 71), card(1, 0.96, 70, mean_power_w=None, power_limit_w=None))
    first, last = run(0.2, cards=cards, gpus=gpus), run(3.2, number=2, cards=cards, gpus=gpus)
    job = replace(ended(gpus=2), queued_at=first.start_at - 41)  # type: ignore[operator]
    found = end_report(job, [first, last], LIMIT)
    assert found is not None
    assert report_lines(found) == [
        "waited 0:41  ran 3:12:00 of 12:00:00 (27%)  runs 2, lost 12:00",
        "GPU 0 busy 97%  71G of 80G  388 of 400 W   GPU 1 busy 96%  70G of 80G  n/a W   idle 2 min",
        "CPU 3.1 of 16  memory 22G of 64G   3.80 kWh  1.44 kg CO2  1.06 EUR (counter)",
        "next time: -c 5 frees 11 cores; -t 5h starts sooner (95 % of 34 jobs like it took at most 3:20:00)",
    ]


def new_shares(count: int) -> list[Any]:
    from gpusched.model.job import GpuShare

    return [GpuShare(f"GPU-{index}", index) for index in range(count)]


def test_unknown_is_na_and_never_zero() -> None:
    (share,) = new_shares(1)
    one = run(cards=(MeasuredCard("GPU-0", 0),), gpus=(share,), cpu_s=None, peak_mem_mib=None, energy_j=None)
    one = replace(one, measured=RunMeasures((MeasuredCard("GPU-0", 0),)))
    found = end_report(ended(None), [one])
    assert found is not None
    assert report_lines(found)[1:] == [
        "GPU 0 busy n/a  n/a of n/a  n/a W",
        "CPU n/a of 16  memory n/a of 64G   energy n/a",
    ]


@pytest.mark.parametrize(
    ("job", "runs"),
    [
        pytest.param(ended(), [], id="never ran"),
        pytest.param(replace(ended(), state=JobState.RUNNING), [run()], id="runs"),
        pytest.param(ended(), [replace(run(), start_at=None)], id="never started"),
    ],
)
def test_no_report(job: Job, runs: list[Run]) -> None:
    assert end_report(job, runs) is None


_MAYBE = st.none() | st.floats(0, 1)


@given(
    cards=st.lists(st.builds(MeasuredCard, st.just("GPU-0"), st.just(0), _MAYBE, st.none() | st.integers(0, 10**6),
                             st.none() | st.integers(0, 10**6), _MAYBE, _MAYBE), max_size=4),
    hours=st.floats(0, 1000),
    cpu_s=st.none() | st.floats(0, 1e9),
    limit_h=st.none() | st.floats(0.01, 1000),
)  # fmt: skip
def test_any_measures_make_a_report(
    cards: list[MeasuredCard], hours: float, cpu_s: float | None, limit_h: float | None
) -> None:
    found = end_report(ended(limit_h), [run(hours, cards=tuple(cards), cpu_s=cpu_s)], vram_seen=SEEN)
    assert isinstance(found, EndReport)
    assert len(found.advice) <= 3
    assert all(line.isprintable() for line in report_lines(found))


@pytest.mark.parametrize(
    ("on", "events"),
    [
        (("end",), {"end", "efficiency"}),
        (("efficiency",), {"efficiency"}),
        (("end", "no_efficiency"), {"end"}),
        (("begin",), {"begin"}),
    ],
)
def test_who_is_told_of_waste(on: tuple[str, ...], events: set[str]) -> None:
    lab = Lab(gpus=1)
    lab.outcome = replace_outcome(lab, 7200)
    lab.load[0] = 0.01
    lab.submit(request=request(gpus=1), alerting=Alerting(on=on))
    for _ in range(75):
        lab.tick(100)
    found = {alert.event: dict(alert.facts) for alert in lab.scheduler.alerts.rows.values()}
    assert found.keys() == events
    if "efficiency" in found:
        assert str(found["efficiency"]["message"]).startswith("its 1 GPU was busy for 1% of")
        assert "GPU 0 busy 1%" in str(found["efficiency"]["report"])
    if "end" in found:
        assert "GPU 0 busy 1%" in str(found["end"]["report"])


def replace_outcome(lab: Lab, seconds: float) -> Any:
    return lab.outcome.__class__(runs_s=seconds)
