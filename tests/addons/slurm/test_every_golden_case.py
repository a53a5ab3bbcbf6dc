"""Every recorded invocation of Slurm is compared by some test, or named here with the reason why none can."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import test_sbatch
import test_scontrol
import test_sinfo
import test_squeue
import test_srun_outside
from golden_cases import FOLDER, Places, case, cases, check
from slurm_lab import SlurmLab

APART = {
    **test_squeue._APART,
    "239-patterns-files": "the names have the node and user in them; see the test of patterns of outputs",
    "241-default-array-file-name": "the listing of a folder; see the test of default names of arrays",
    "243-output-unwritable-state": "a folder that is missing is created here",
    "246-requeue-out": "what a job's script printed; see the tests of requeue",
    "261-sacct-other-user": "bob has no jobs in a personal daemon; see the tests of sacct with two users",
    "264-sacct-units": "figures of that machine; its columns are compared, and see the test of what tasks have used",
    "267-sreport": "there is no sreport here",
    "268-sshare-after": "usage of that machine; the same columns are compared before there is any",
}
"""Cases that no test compares, and why."""
IN_LISTS = (
    *test_sbatch.COMPARED,
    *test_srun_outside.COMPARED,
    *test_scontrol._PLAYED,
    *test_sinfo._IDLE,
    *cases("squeue", *(f"{number:03d}" for number in (*test_squeue._AS_A_WHOLE, *test_squeue._BY_ROW))),
    # Played one after the other.
    *cases("scancel"),
    *cases("salloc"),
)
"""Cases by which tests are parametrized, or that one test plays."""


def named_cases(path: Path) -> Iterator[str]:
    """Names of the cases that a file of tests takes by number: `case("sacct", 5)`, or one of a loop."""
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(function, ast.FunctionDef):
            continue
        sources = [
            *function.decorator_list,
            *(one.iter for one in ast.walk(function) if isinstance(one, (ast.For, ast.comprehension))),
        ]
        others = {number for source in sources for number in _numbers(source)}
        for call in ast.walk(function):
            if not (isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("case", "cases") and call.args):
                continue
            command, *wanted = call.args
            if not (isinstance(command, ast.Constant) and isinstance(command.value, str)):
                continue
            known = {int(one.name[:3]): one.name for one in cases(command.value)}
            numbers = {number for one in wanted for number in _numbers(one)}
            if any(isinstance(one, ast.Name) for one in wanted):
                numbers |= others
            yield from (known[number] for number in numbers if number in known)


def _numbers(node: ast.AST) -> Iterator[int]:
    for one in ast.walk(node):
        if isinstance(one, ast.Constant) and isinstance(one.value, (int, str)):
            found = str(one.value)[:3]
            if found.isascii() and found.isdigit():
                yield int(found)


def test_every_golden_case_is_compared_or_has_a_reason() -> None:
    every = {one.name for path in FOLDER.glob("*.txt") for one in cases(path.stem)}
    here = Path(__file__).parent
    compared = {one.name for one in IN_LISTS} | {
        name for path in here.glob("test_*.py") if path.name != "test_golden_cases.py" for name in named_cases(path)
    }
    assert sorted(every - compared - set(APART)) == [], "compared by no test"
    assert all(APART.values())
    assert set(APART) <= every


def test_finds_the_numbers_that_tests_name(tmp_path: Path) -> None:
    path = tmp_path / "test_x.py"
    path.write_text(
        "@pytest.mark.parametrize('number', [248, 249])\n"
        "def test_a(number): check(case('sacct', number))\n"
        "def test_b():\n    for number in (251, 999): check(case('sacct', number))\n"
        "def test_c(): case('sacct', 5); case('sacct', '253'); cases('scancel'); case(what, 6); x('sacct', 260)\n"
    )
    assert sorted(named_cases(path)) == [
        "005-sacct-version",
        "248-sacct-plain",
        "249-sacct-X",
        "251-sacct-n-P",
        "253-sacct-format",
    ]


def test_versions_are_those_of_slurm(lab: SlurmLab) -> None:
    check(lab, case("srun", 6), {})


_MASK = (
    r"Priority=(\d+)",
    r"RunTime=(\S+)",
    r"TimeLimit=(\S+)",
    r"AllocNode:Sid=(\S+)",
    r"LastSchedEval=(Unknown|<[^>]+>)",
)
_NEVER_PLANNED = (r"NumTasks=(\S+)", r"TRES=(\S+)")
"""Slurm counts no tasks of such a job, and all memory of the node."""


def test_a_job_that_can_never_start_is_shown_as_by_slurm(lab: SlurmLab) -> None:
    failed = lab.submit("--wrap false")
    lab.wait(failed)
    gone = lab.submit(f"-t 60 --kill-on-invalid-dep=yes -d afterok:{failed} -J gone --wrap true")
    lab.wait(gone)
    check(lab, case("scontrol", 237), {}, Places(jobs={65: failed, 67: gone}, mask=(*_MASK, *_NEVER_PLANNED)))


def test_a_job_that_reached_its_limit_is_shown_as_by_slurm(lab: SlurmLab) -> None:
    job = lab.ok("gsub --parsable -t 1s -o slurm-%j.out --wrap 'sleep 200'").strip()
    lab.wait(job)
    check(lab, case("scontrol", 247), {}, Places(jobs={47: job}, mask=_MASK))


def test_sacct_has_the_columns_of_usage(lab: SlurmLab) -> None:
    golden = case("sacct", "264")
    job = lab.ok(case("sbatch", "230").command).strip()
    lab.wait(job)
    ours = lab.ok(Places(jobs={62: job}).command(golden)).splitlines()
    theirs = golden.out.splitlines()
    assert ours[0] == theirs[0]
    assert [line.split("|")[0].partition(".")[2] for line in ours] == [
        line.split("|")[0].partition(".")[2] for line in theirs
    ]
