"""A person who leaves grun while its job is pending, impatiently."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from gpusched.cli.grun import LEAVING, Interrupted, _leave


@pytest.fixture
def leaving() -> Iterator[None]:
    before = {number: signal.signal(number, _leave) for number in LEAVING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("first", LEAVING)
@pytest.mark.usefixtures("leaving")
def test_a_second_signal_does_not_interrupt_the_cancel(first: signal.Signals) -> None:
    with pytest.raises(Interrupted) as caught:
        os.kill(os.getpid(), first)
    for number in LEAVING:
        os.kill(os.getpid(), number)
    assert caught.value.number == first
