"""Real invocations of Slurm 22.05.8 and what they left, to compare ours with.

`golden/COMMAND.txt` holds them in a short form:

    == NAME USER EXIT
    # situation, where it matters
    $ the command line
    |a line of standard output
    !a line of standard error

They are facts, never edited. What ours does differently on purpose has a line in the table of the test that compares.
`{work}` is the folder in which the commands were typed. Ids, times and users of the golden machine stand for those of
the test, see `Places`.
"""

from __future__ import annotations

import difflib
import getpass
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slurm_lab import SlurmLab, Typed

FOLDER = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class GoldenCase:
    """One invocation."""

    name: str
    user: str
    code: int
    command: str
    out: str
    err: str
    situation: str = ""

    def __str__(self) -> str:
        return self.name


def cases(command: str, *numbers: int | str) -> list[GoldenCase]:
    """The cases of one command, all or those with these numbers (or whole names), in the order of the real run."""
    found = _read(FOLDER / f"{command}.txt")
    if not numbers:
        return found
    wanted = {f"{number:03d}" if isinstance(number, int) else number for number in numbers}
    chosen = [case for case in found if case.name in wanted or case.name[:3] in wanted]
    missing = wanted - {case.name for case in chosen} - {case.name[:3] for case in chosen}
    assert not missing, f"no such golden cases of {command}: {sorted(missing)}"
    return chosen


def case(command: str, number: int | str) -> GoldenCase:
    """One case."""
    (found,) = cases(command, number)
    return found


def _read(path: Path) -> list[GoldenCase]:
    found = []
    for block in re.split(r"^== ", path.read_text(encoding="utf-8"), flags=re.M)[1:]:
        head, *lines = block.split("\n")[:-1]
        name, user, code = head.split(" ")
        texts: dict[str, list[str]] = {mark: [line[1:] for line in lines if line[0] == mark] for mark in "#$|!"}
        assert sum(map(len, texts.values())) == len(lines), f"{path}: {name}"
        (command,) = texts["$"]
        out, err = ("".join(f"{line}\n" for line in texts[mark]) for mark in "|!")
        found.append(
            GoldenCase(name, user, int(code), command[1:], out, err, "".join(texts["#"]).strip()),
        )
    return found


_INSTANT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")
_DATE = re.compile(r"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) (?:[A-Z][a-z]{2}) [ \d]\d \d\d:\d\d:\d\d \d{4}")


@dataclass
class Places:
    """What of the golden machine stands for what of ours.

    Args:
        jobs: golden job id -> ours, in commands and outputs; ids that are not named stay as they are.
        mask: regular expressions; what they match, or their first group, is left out of the comparison in both texts.
        is_blind_to_width: runs of blanks count as one, for columns that hold names of different lengths.
    """

    jobs: Mapping[int, str] = field(default_factory=dict)
    mask: Sequence[str] = ()
    is_blind_to_width: bool = False

    def command(self, case: GoldenCase) -> str:
        """The command line with our ids."""
        return self._renumber(case.command)

    def expected(self, case: GoldenCase, text: str) -> str:
        """What ours should print."""
        return self._masked(self._renumber(text))

    def seen(self, lab: SlurmLab, text: str) -> str:
        """What ours printed, with the golden machine's names."""
        text = text.replace(str(lab.work), "{work}")
        here = socket.gethostname()
        if here != "node1":
            text = _swap(text, here, "node1")
        text = text.replace(f"{getpass.getuser()}({os.getuid()})", "alice(1001)")
        text = re.sub(rf"GroupId=\w+\({os.getgid()}\)", "GroupId=alice(1001)", text)
        text = re.sub(rf"UserId={os.getuid()}\b", "UserId=1001", text)
        return self._masked(_swap(text, getpass.getuser(), "alice"))

    def _renumber(self, text: str) -> str:
        """Our ids for the golden ones, in place: right-justified ones keep their column."""

        def ours(match: re.Match[str]) -> str:
            number = self.jobs.get(int(match[2]))
            if number is None:
                return match[0]
            blanks, extra = match[1], len(number) - len(match[2])
            if len(blanks) > 1:
                blanks = " " * max(1, len(blanks) - extra)
            return f"{blanks}{number}"

        if not self.jobs:
            return text
        numbers = "|".join(str(number) for number in sorted(self.jobs, reverse=True))
        before, after = r"(?<![\w.+-])(?<!\d:)", r"""(?=[_\[.,;:|?\s()'"]|$)(?!:\d\d)"""
        text = re.sub(rf"{before}( *)\b({numbers}){after}", ours, text)
        return re.sub(rf"(?<=/slurm-)()({numbers})(?=[._])", ours, text)

    def _masked(self, text: str) -> str:
        text = _INSTANT.sub("<instant: 19 letter>", text)
        text = _DATE.sub("<date>", text)
        for pattern in self.mask:
            text = re.sub(pattern, lambda match: match[0].replace(match[match.re.groups and 1], "<masked>"), text)
        if self.is_blind_to_width:
            text = re.sub(r"[ \t]+", " ", text)
            text = re.sub(r"(?m)^ | $", "", text)
        return text


def _swap(text: str, ours: str, golden: str) -> str:
    """A name for another. Where blanks beside it make up a column's width, they give way."""
    extra = len(golden) - len(ours)
    if extra == 0 or not ours:
        return text.replace(ours, golden) if ours else text

    def put(match: re.Match[str]) -> str:
        before, after = match[1], match[2]
        if len(before) > 1:
            return " " * max(1, len(before) - extra) + golden + after
        if len(after) > 1:
            return before + golden + " " * max(1, len(after) - extra)
        return before + golden + after

    return re.sub(rf"( *)\b{re.escape(ours)}\b( *)", put, text)


def check(
    lab: SlurmLab,
    case: GoldenCase,
    differs: Mapping[str, str],
    places: Places | None = None,
    *,
    may_explain: bool = False,
) -> Typed:
    """Type a case's command and compare; returns what ours left.

    Args:
        differs: name of a case -> why ours is another answer. Such a case must differ: a reason that is none any more
            fails.
        may_explain: after Slurm's lines on stderr ours may say more: `COMMAND: sentence`, `COMMAND: hint: sentence`.
    """
    places = places or Places()
    done = lab.type(places.command(case))
    err = places.seen(lab, done.err)
    golden = (case.code, places.expected(case, case.out), places.expected(case, case.err))
    if may_explain and err.startswith(golden[2]):
        more = err[len(golden[2]) :].splitlines()
        if all(
            re.match(r"(?:sbatch|srun|salloc|squeue|scancel|scontrol|sinfo|sacct\w*): (?!error: )", line)
            for line in more
        ):
            err = golden[2]
    ours = (done.code, places.seen(lab, done.out), err)
    if case.name in differs:
        assert differs[case.name], "say why it differs"
        assert ours != golden, f"{case.name} does not differ any more; take it out of the table"
    else:
        assert "Traceback" not in done.err
        assert ours == golden, f"{case.command}\n{_difference(golden, ours)}"
    return done


def _difference(golden: tuple[int, str, str], ours: tuple[int, str, str]) -> str:
    """Line by line, with Slurm's as `-` and ours as `+`."""
    texts = [
        f"exit {code}\n--- stdout\n{out}--- stderr\n{err}".splitlines(keepends=True)
        for code, out, err in (golden, ours)
    ]
    return "".join(difflib.unified_diff(*texts, "Slurm", "ours", n=1))


def check_table(command: str, differs: Mapping[str, str], compared: Sequence[GoldenCase]) -> None:
    """Every reason belongs to a case that is compared, and none is empty."""
    assert set(differs) <= {case.name for case in compared}, f"{command}: reasons for cases that are not compared"
    assert all(differs.values())
