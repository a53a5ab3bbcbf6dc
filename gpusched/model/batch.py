"""Batches: a job for each of many shell lines, submitted at once."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence

from gpusched.model.job import JobSpec
from gpusched.model.spec import MAX_NAME
from gpusched.model.value import Value, replace


class Batch(Value):
    """One row of the batch table: jobs that were accepted together, and are made in pieces.

    The row is there while jobs remain to be made, and, under a key, as long as any of the jobs is.
    """

    first_id: int
    """Id of its first job; the others follow without a gap."""
    jobs: int
    uid: int
    user: str
    submit_at: float
    spec: JobSpec
    """What the jobs have in common: all but the command line, the name unless `is_named`, and a learned time limit."""
    lines_sha: str
    """SHA-256 of its lines, one document, kept with scripts and environments until all jobs are made."""
    story: str
    """First line of each job's story."""
    is_named: bool = False
    """The jobs have the name of the spec; otherwise each has that of its command."""
    key: str | None = None
    made: int = 0
    """Number of jobs that have their row: the first ones."""

    @property
    def last_id(self) -> int:
        return self.first_id + self.jobs - 1

    @property
    def left(self) -> int:
        """Number of jobs to be made."""
        return self.jobs - self.made

    @property
    def shown_ids(self) -> str:
        """Its jobs, as errors name them."""
        if self.jobs == 1:
            return f"job {self.first_id}"
        return f"jobs {self.first_id} {'and' if self.jobs == 2 else 'to'} {self.last_id}"

    def specs(self, lines: Sequence[str]) -> list[JobSpec]:
        """The jobs of these lines."""
        return specs_of(self.spec, lines, is_named=self.is_named)


def specs_of(spec: JobSpec, lines: Sequence[str], *, is_named: bool) -> list[JobSpec]:
    """A job for each shell line. Args: is_named: whether they have the name of the spec, or those of their commands."""
    launch = spec.launch
    return [
        replace(
            spec,
            launch=replace(launch, argv=("/bin/sh", "-c", line), script_name="batch"),
            name=spec.name if is_named else _first_word(line),
        )
        for line in lines
    ]


def _first_word(line: str) -> str:
    words = line.split(maxsplit=1)
    return posixpath.basename(words[0])[:MAX_NAME] or "batch" if words else "batch"
