"""The process that tests fork their commands from is made again when a test has ended it with its own children."""

from __future__ import annotations

import os

import pytest
import warm
from shell import Shell
from warm import commands


def test_a_command_is_forked_after_the_process_for_it_was_killed(sh: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "_nests", {})  # and not one that other workers use
    for _ in range(2):
        assert sh.type("gsub", "--version").code == 0
        nest = commands(dict(os.environ))
        assert nest is not None
        assert nest._process is not None
        nest._process.kill()
        nest._process.wait()
    assert nest.has_ended
    assert sh.type("gsub", "--version").code == 0
