"""The harness that compares with Slurm's own outputs."""

from __future__ import annotations

import getpass
from pathlib import Path

import pytest
from golden_cases import FOLDER, GoldenCase, Places, case, cases, check
from slurm_lab import SlurmLab, Typed


def test_reads_every_case_once() -> None:
    found = [one.name for path in sorted(FOLDER.glob("*.txt")) for one in cases(path.stem)]
    assert len(found) == len(set(found)) > 250


def test_keeps_blank_lines_and_trailing_blanks_of_both_streams() -> None:
    assert case("squeue", "103-squeue-u-bad").err == "squeue: error: Invalid user: nosuch\n\n"
    assert case("scontrol", 142).out.splitlines()[0].endswith("CoresPerSocket=1 ")
    assert case("sbatch", 38).code == 3


def test_puts_our_ids_in_place_and_leaves_times_counts_and_steps() -> None:
    places = Places(jobs={25: "103", 28: "7"})
    found = places.expected(
        case("squeue", 97), "                25      main 0:25 25:00\n      28_[1-10%2] 25 JobId=25 x=28,25\n"
    )
    assert found == "               103      main 0:25 25:00\n       7_[1-10%2] 103 JobId=103 x=7,103\n"
    paths = places.expected(case("squeue", 97), "StdOut=/w/slurm-28_2.out Dependency=afterok:25(unfulfilled)\n")
    assert paths == "StdOut=/w/slurm-7_2.out Dependency=afterok:103(unfulfilled)\n"
    one = GoldenCase("x", "alice", 0, "scontrol show job 28_2; scancel 25.0 99999", "", "")
    assert places.command(one) == "scontrol show job 7_2; scancel 103.0 99999"
    one = GoldenCase("x", "alice", 0, "sbatch -d 'afterok:25?afternotok:28' --wrap 'sleep 25'", "", "")
    assert places.command(one) == "sbatch -d 'afterok:103?afternotok:7' --wrap 'sleep 103'"


def test_masks_instants_and_what_a_case_names() -> None:
    places = Places(mask=[r" R +(\d:\d\d)"])
    assert places.expected(case("squeue", 97), "25 R  0:09 2026-11-21T04:34:35 1:00:00\n") == (
        "25 R  <masked> <instant: 19 letter> 1:00:00\n"
    )


class FakeLab:
    work = Path("/tmp/there/work")

    def __init__(self, *answer: object) -> None:
        self.answer = answer

    def type(self, line: str) -> Typed:
        return Typed(*self.answer)  # type: ignore[arg-type]


def test_shows_our_user_and_folder_as_the_golden_ones_in_their_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("al", "alice", "alexandra"):
        monkeypatch.setattr(getpass, "getuser", lambda name=name: name)
        found = Places().seen(FakeLab(), f"|{name:>12}|{name:<12}|{name} x\nWorkDir=/tmp/there/work\n")  # type: ignore[arg-type]
        assert found == f"|{'alice':>12}|{'alice':<12}|alice x\nWorkDir={{work}}\n"


def test_fails_where_ours_differs_and_where_a_reason_is_none_any_more() -> None:
    golden = GoldenCase("001-x", "alice", 1, "squeue", "out\n", "err\n")
    same, other = FakeLab(1, "out\n", "err\n"), FakeLab(1, "out\n", "")
    check(same, golden, {})  # type: ignore[arg-type]
    check(other, golden, {"001-x": "because"})  # type: ignore[arg-type]
    for lab, differs in ((same, {"001-x": "because"}), (other, {}), (other, {"001-x": ""})):
        with pytest.raises(AssertionError):
            check(lab, golden, differs)  # type: ignore[arg-type]


def test_lets_ours_explain_after_slurms_lines_where_it_may() -> None:
    golden = GoldenCase("001-x", "alice", 1, "sbatch", "", "sbatch: error: no\n")
    more = FakeLab(1, "", "sbatch: error: no\nsbatch: because\nsbatch: hint: do that\n")
    check(more, golden, {}, may_explain=True)  # type: ignore[arg-type]
    for lab, may_explain in (
        (more, False),
        (FakeLab(1, "", "sbatch: because\nsbatch: error: no\n"), True),
        (FakeLab(1, "", "sbatch: error: no\nsbatch: error: again\n"), True),
        (FakeLab(1, "", "sbatch: error: no\nTraceback\n"), True),
    ):
        with pytest.raises(AssertionError):
            check(lab, golden, {}, may_explain=may_explain)  # type: ignore[arg-type]


def test_a_daemon_like_the_golden_machine_runs_a_job(lab: SlurmLab) -> None:
    job = lab.ok(
        "gsub --parsable -t 5m -g 1 --wrap 'echo $CUDA_VISIBLE_DEVICES on $SLURM_JOB_PARTITION > seen'"
    ).strip()
    lab.wait(job)
    assert lab.state(job) == "COMPLETED"
    assert lab.text("seen") == "0 on main\n"
