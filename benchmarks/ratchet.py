"""Function calls of fixed pieces of work beside their records: whether the hot paths have become dearer.

    python -m benchmarks ratchet                  print figures and records; exit code 1 if they do not match
    python -m benchmarks ratchet --tighten        lower the records to what there is, and add those that are missing
    python -m benchmarks ratchet --where FIGURE   print the functions that are called most often in this piece

Calls are counted in an interpreter of their own, see `benchmarks.counted`: other users of the machine make no
difference to them, and two counts are equal to a percent. They do depend on the version of Python, so each has records
of its own in `ratchet.json`; where there are none, nothing is compared. A record is raised by hand only, in a commit
that says what the calls are for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.counted import FIXED, ROOT

RECORDS = Path(__file__).with_suffix(".json")
ROOM = 0.15
"""How far a figure may be from its record, either way."""
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"

Figures = Mapping[str, float]


def measure(where: str = "") -> tuple[dict[str, float], list[tuple[str, float]]]:
    """Figures by name, and the functions called most often in one of them. Raises: CalledProcessError."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.counted", where],
        env={"PATH": os.environ.get("PATH", os.defpath), **FIXED},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    answer = json.loads(done.stdout)
    return answer["found"], answer["top"]


def records() -> dict[str, dict[str, float]]:
    """Recorded figures, by version of Python and name."""
    found: dict[str, dict[str, float]] = json.loads(RECORDS.read_text(encoding="utf-8"))
    return found


def findings(found: Figures, recorded: Figures) -> list[str]:
    """A sentence for each figure that does not match its record, with the command that says more or mends it."""
    sentences = []
    for name in dict.fromkeys((*found, *recorded)):
        if name not in found:
            sentences.append(f"{name}: it is recorded and not counted; drop it with: {_TIGHTEN}")
        elif name not in recorded:
            sentences.append(f"{name}: it has no record; add it with: {_TIGHTEN}")
        elif found[name] > recorded[name] * (1 + ROOM):
            sentences.append(
                f"{name}: {found[name]:,.1f}, {found[name] / recorded[name] - 1:.0%} above its record of "
                f'{recorded[name]:,.1f}; see where with: python -m benchmarks ratchet --where "{name}"'
            )
        elif found[name] < recorded[name] * (1 - ROOM):
            sentences.append(
                f"{name}: {found[name]:,.1f}, {1 - found[name] / recorded[name]:.0%} below its record of "
                f"{recorded[name]:,.1f}; keep what was won with: {_TIGHTEN}"
            )
    return sentences


_TIGHTEN = "python -m benchmarks ratchet --tighten"


def tightened(found: Figures, recorded: Figures) -> dict[str, float]:
    """The records of what there is: none higher than before."""
    return {name: min(figure, recorded.get(name, figure)) for name, figure in found.items()}


def main(words: Sequence[str] = ()) -> int:
    """Print figures beside their records. Returns the process exit code."""
    match words:
        case [] | ["--tighten"]:
            where = ""
        case ["--where", where]:
            pass
        case _:
            sys.stderr.write(f"{__doc__}")
            return 2
    found, top = measure(where)
    if where:
        for function, calls in top:
            print(f"{calls:12,.1f}  {function}")
        if not top:
            print(f"no figure {where!r}; there are: {', '.join(found)}", file=sys.stderr)
        return 0 if top else 2
    every = records()
    if words:
        every[VERSION] = tightened(found, every.get(VERSION, {}))
        RECORDS.write_text(json.dumps(every, indent=2) + "\n", encoding="utf-8")
    recorded = every.get(VERSION, {})
    for name, calls in found.items():
        beside = f"record {recorded[name]:12,.1f}  {calls / recorded[name] - 1:+7.1%}" if name in recorded else ""
        print(f"{name:<50} {calls:12,.1f}  {beside}".rstrip())
    if not recorded:
        print(f"there are no records for Python {VERSION}, so nothing is compared")
        return 0
    problems = findings(found, recorded)
    print("".join(f"\n{problem}" for problem in problems).lstrip("\n") or "all match")
    return 1 if problems else 0
