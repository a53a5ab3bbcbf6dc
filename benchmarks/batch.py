"""What others notice of a big batch: their commands beside it, as multiples of the same commands alone."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks.harness import Bench, percentile, scheduler, show

LINES = 60_000
_ALONE = 40


def main(lines: int = LINES) -> None:
    """Type `gq --limit 3` and `gsub` in turn: alone, and while another process submits a batch."""
    with scheduler() as bench:
        path = os.path.join(bench.home, "lines")
        with open(path, "w", encoding="ascii") as file:
            file.writelines(f"python train.py --seed {number}\n" for number in range(lines))
        commands = {
            "gq --limit 3": bench.command("gq", "--limit", "3"),
            "gsub": bench.command("gsub", "--hold", "-o", "/dev/null", "--", "true"),
        }
        alone = _type_in_turn(bench, commands, lambda typed: typed >= _ALONE)
        batch = bench.command("gsub", "--batch", path, "--hold", "-o", "/dev/null", "--export=NONE")
        began = time.perf_counter()
        with subprocess.Popen(batch, env=bench.env, stdout=subprocess.DEVNULL) as submitting:
            beside = _type_in_turn(bench, commands, lambda _: submitting.poll() is not None)
        print(f"a batch of {lines} lines took {time.perf_counter() - began:.1f} s")
        for name in commands:
            show(f"{name}, alone", alone[name])
            show(f"{name}, beside the batch", beside[name])
            for part in (0.5, 0.99):
                ratio = percentile(beside[name], part) / percentile(alone[name], part)
                print(f"    p{part * 100:.0f} beside / alone: {ratio:.1f}")


def _type_in_turn(
    bench: Bench, commands: Mapping[str, Sequence[str]], is_over: Callable[[int], bool]
) -> dict[str, list[float]]:
    """Milliseconds of each command, typed one after the other, until `is_over` of the number of rounds."""
    samples: dict[str, list[float]] = {name: [] for name in commands}
    rounds = 0
    while not rounds or not is_over(rounds):
        for name, argv in commands.items():
            began = time.perf_counter()
            subprocess.run(argv, env=bench.env, check=True, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
            samples[name].append((time.perf_counter() - began) * 1e3)
        rounds += 1
    return samples
