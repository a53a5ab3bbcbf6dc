"""Did you mean: slips are mended, other meanings are not proposed."""

from __future__ import annotations

import pytest

from gpusched.cli.job_options import gsub_table
from gpusched.cli.parse import parse
from gpusched.errors import UsageError
from gpusched.model.units import closest

KNOWN = ("--cpus-per-task", "--mem-per-cpu", "--time", "--output", "--nodes", "--retries", "poll_s", "gpus")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--cpu-per-task", "--cpus-per-task"),
        ("--cpus-per-tsak", "--cpus-per-task"),
        ("--retrys", "--retries"),
        ("polls", "poll_s"),
        ("gpu", "gpus"),
        ("--gpus-per-task", None),  # asks for GPUs, not for cores
        ("--mem-per-task", None),
        ("--input", None),
        ("xyz", None),
        ("", None),
    ],
)
def test_proposes_slips_of_the_keyboard_only(word: str, meant: str | None) -> None:
    assert closest(word, KNOWN) == meant


def test_finds_nothing_among_no_words() -> None:
    assert closest("time", ()) is None


@pytest.mark.parametrize("option", ["--nodes-per-gpu", "--nodes-per-task", "--mem-per-node", "--time-per-task"])
def test_never_proposes_an_option_that_counts_something_else(option: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse(gsub_table(), [option, "2"])
    assert "did you mean" not in raised.value.hint
