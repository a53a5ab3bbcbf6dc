"""Pipelines: jobs submitted together with dependencies by step name."""

from __future__ import annotations

from dataclasses import dataclass

from gpusched.model.value import Value


class Pipeline(Value):
    """One row of the pipeline table. Its jobs carry its id, `p42`, and their step's name."""

    number: int
    uid: int
    user: str
    name: str
    submit_at: float
    source: str
    """The submitted file. May hold lone surrogates for bytes that are not UTF-8."""

    @property
    def id(self) -> str:
        """Id for display: `p42`, which no job can be named."""
        return pipeline_id(self.number)


def pipeline_id(number: int) -> str:
    return f"p{number}"


@dataclass(frozen=True, slots=True)
class StepNeed:
    """Dependency on another step, and its required outcome."""

    kind: str
    step: str
    delay_s: int = 0
    """For `after`: delay after the other step's start."""


@dataclass(frozen=True, slots=True)
class StepNeeds:
    """A conjunction or disjunction of dependencies."""

    all: tuple[StepNeed, ...] = ()
    is_any: bool = False

    @property
    def steps(self) -> tuple[str, ...]:
        """Names of the steps in the dependencies, without duplicates, in order."""
        return tuple(dict.fromkeys(need.step for need in self.all))
