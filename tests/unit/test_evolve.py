"""Copies of frozen values with other fields."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, replace

import pytest

from gpusched.model.evolve import evolve
from gpusched.model.job import Run
from gpusched.model.states import JobState, RunState
from gpusched.testing import job

RUN = Run(42, 1, RunState.STARTING, "n1", "boot", 0.0)


@pytest.mark.parametrize(
    ("value", "changes"),
    [
        (job(7), {}),
        (job(7), {"state": JobState.RUNNING, "run": 1, "start_at": 3.0}),
        (RUN, {"exit_code": 0}),
        (job(7).spec, {"name": "other"}),
    ],
)
def test_a_copy_is_what_replace_makes(value, changes) -> None:
    before = replace(value)
    made = evolve(value, **changes)
    assert made == replace(value, **changes)
    assert value == before
    assert hash(made) == hash(replace(value, **changes))


def test_a_copy_is_frozen_as_well() -> None:
    with pytest.raises(FrozenInstanceError):
        evolve(RUN, number=2).number = 3  # type: ignore[misc]


def test_an_unknown_field_is_an_error() -> None:
    with pytest.raises(TypeError, match="Run has no field 'colour'"):
        evolve(RUN, colour="red")


def test_a_class_that_it_cannot_copy_faithfully_is_refused() -> None:
    @dataclass(frozen=True)
    class Loose:
        one: int = 1
        two: int = 2

    with pytest.raises(TypeError, match="Loose is no dataclass with slots"):
        evolve(Loose(), one=3)
