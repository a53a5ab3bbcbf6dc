"""squeue: golden outputs, the fields of -o and -O, filters, and what tools that call it read."""

from __future__ import annotations

import pytest
from golden_cases import GoldenCase, Places, cases, check
from slurm_lab import SlurmLab

Busy = tuple[SlurmLab, dict[int, str]]

DIFFERS: dict[str, str] = {}
"""Golden cases that squeue answers otherwise, and why."""


@pytest.mark.parametrize(
    "case", cases("squeue", "002", "103", "106", "107", "108", "112", "114", "131"), ids=lambda case: case.name
)
def test_squeue_answers_as_slurm_whatever_is_queued(lab: SlurmLab, case: GoldenCase) -> None:
    check(lab, case, DIFFERS, Places(is_blind_to_width=True))
