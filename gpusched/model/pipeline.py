"""A pipeline: jobs that were submitted together and wait for each other by name."""

from __future__ import annotations

from dataclasses import dataclass

from gpusched.model.value import Value


class Pipeline(Value):
    """One row of the table of pipelines. Its jobs carry its name, `p42`, and that of their step."""

    number: int
    uid: int
    user: str
    name: str
    submit_at: float
    source: str
    """The file as it was submitted. May hold lone surrogates for bytes that are not UTF-8."""

    @property
    def id(self) -> str:
        """As people know it: `p42`, which no job can be called."""
        return pipeline_id(self.number)


def pipeline_id(number: int) -> str:
    """The id of the pipeline with this number."""
    return f"p{number}"


@dataclass(frozen=True, slots=True)
class StepNeed:
    """Another step, and what must have become of it."""

    kind: str
    step: str
    delay_s: int = 0
    """With `after`: so long after the start."""


@dataclass(frozen=True, slots=True)
class StepNeeds:
    """All of the needs, or any of them."""

    all: tuple[StepNeed, ...] = ()
    is_any: bool = False

    @property
    def steps(self) -> tuple[str, ...]:
        """The steps that are named, each once, in order."""
        return tuple(dict.fromkeys(need.step for need in self.all))
