"""Families of jobs, and what the newest runs of one say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.model.job import Job
from gpusched.predict.family import SAMPLES, family, predict
from gpusched.testing import job, launch, request


def command(*argv: str, **parts: object) -> Job:
    return job(1, launch=launch(*argv), request=request(gpus=1), **parts)


def script(name: str | None, job_name: str = "test") -> Job:
    return job(1, name=job_name, launch=launch("--rate", "1", script_sha="a" * 64, script_name=name))


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (command("/home/ann/train.sh", "1"), command("train.sh", "2"), True),
        (command("python", "train.py"), command("/usr/bin/python", "-u", "src/train.py", "--rate", "2"), True),
        (command("python", "train.py"), command("python", "eval.py"), False),
        (command("train.sh"), command("train.sh", user="bob"), False),
        (command("train.sh"), job(1, launch=launch("train.sh"), request=request(gpus=2)), False),
        (script("a/run.sh"), script("b/run.sh"), True),
        (script("wrap", "one"), script("wrap", "two"), False),
        (script("stdin", "one"), script(None, "one"), True),
        (command("bash"), command("bash", "-l"), True),
        (
            job(1, launch=launch("/bin/sh", "-c", "python a.py 1", script_name="batch")),
            job(1, launch=launch("/bin/sh", "-c", "python a.py 2", script_name="batch")),
            True,
        ),
        (
            job(1, launch=launch("/bin/sh", "-c", "python a.py 1", script_name="batch")),
            job(1, launch=launch("/bin/sh", "-c", "python b.py 1", script_name="batch")),
            False,
        ),
    ],
)
def test_similar_jobs_are_matched(one: Job, other: Job, alike: bool) -> None:
    assert (family(one) == family(other)) is alike


def test_fewer_than_three_runs_give_no_prediction() -> None:
    assert predict([]) is None
    assert predict([5.0, 5.0]) is None
    assert predict([5.0, 5.0, 5.0]) is not None


def test_one_outlier_does_not_move_the_median() -> None:
    found = predict([100.0] * 10 + [90_000.0])
    assert found is not None
    assert (found.low_s, found.median_s, found.samples) == (100.0, 100.0, 11)
    assert found.high_s == 100.0


def test_only_the_newest_runs_count() -> None:
    found = predict([9999.0] * 200 + [10.0] * SAMPLES)
    assert found is not None
    assert found.high_s == 10.0


@given(st.lists(st.floats(0, 1e6), min_size=3, max_size=80))
def test_quantiles_are_ordered_and_measured(run_times_s: list[float]) -> None:
    found = predict(run_times_s)
    assert found is not None
    assert found.low_s <= found.median_s <= found.high_s
    assert {found.low_s, found.median_s, found.high_s} <= set(run_times_s[-SAMPLES:])
