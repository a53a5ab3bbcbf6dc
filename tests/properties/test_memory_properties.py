"""Whatever happens, fails or raises: between two ticks the memory is the one that a restart would load."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lab_stories import LabStory
from memory import check_memory


class MemoryStory(LabStory):
    def check(self) -> None:
        check_memory(self.lab)


def play(seed: int, turns: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        MemoryStory(Random(seed), patch).play(turns)


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=12, deadline=None)
def test_memory_equals_a_restart(seed: int) -> None:
    play(seed, 40)


@pytest.mark.nightly
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=1000, deadline=None)
def test_memory_equals_a_restart_nightly(seed: int) -> None:
    play(seed, 80)
