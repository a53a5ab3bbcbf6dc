"""The list of benchmarks can be asked for; each is a module that is there."""

from __future__ import annotations

import pkgutil

import pytest

import benchmarks
from benchmarks.__main__ import BENCHES, main


def test_every_benchmark_exists_and_is_named() -> None:
    modules = {module.name for module in pkgutil.iter_modules(benchmarks.__path__)}
    parts = {"__main__", "cases", "counted", "fairness", "generated", "harness"}
    assert modules - parts - {"knowledge", "million", "orders", "ranges"} == set(BENCHES)


def test_an_unknown_benchmark_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nope"]) != 0
    shown = capsys.readouterr()
    assert "no benchmark 'nope'; there are: arrays" in shown.out + shown.err


def test_options_of_the_ratchet_are_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ratchet", "--loosen"]) == 2
    assert "--tighten" in capsys.readouterr().err
