"""What Slurm's commands print and what wrappers record, read with care; what became of a run according to them."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.addons.slurm.engine.answers import (
    NativeState,
    RunRecord,
    accepted_id,
    by_mark,
    last_words,
    may_be_accepted_later,
    outcome,
    read_accounting,
    read_instant,
    read_job,
    read_queue,
    read_record,
)
from gpusched.model.execution import RunEnded, RunLost

NOW = 2000.0


def test_squeue_lines_with_comments_of_others_are_read() -> None:
    text = (
        "101|PENDING|Priority|N/A||gpusched:41.1.1700000000\n"
        "102|RUNNING|None|1500|gpu[01-02]|mine | with bars\n"
        "103_4|PENDING|Resources|N/A||(null)\n"
        "slurm_load_jobs: noise\n"
    )
    first, second = read_queue(text)
    assert first == NativeState("101", "PENDING", "Priority", comment="gpusched:41.1.1700000000")
    assert (second.reason, second.start_at, second.nodes, second.comment) == (
        "",
        1500.0,
        "gpu[01-02]",
        "mine | with bars",
    )
    assert second.has_begun
    assert not first.has_begun
    assert by_mark([first, second], ["41.1.1700000000", "7.1.1"]) == {"41.1.1700000000": first}


def test_of_two_jobs_with_one_mark_the_first_counts() -> None:
    jobs = [NativeState(number, "PENDING", comment="gpusched:1.1.5") for number in ("20", "9")]
    assert by_mark(jobs, ["1.1.5"])["1.1.5"].id == "9"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "7|CANCELLED by 1001|0:15|100|200|n1",
            NativeState("7", "CANCELLED", "", 100, 200, "n1", "", None, 15, "1001"),
        ),
        ("7|FAILED|3:0|100|200|n1", NativeState("7", "FAILED", "", 100, 200, "n1", "", 3)),
        ("7|CANCELLED+|0:0|Unknown|Unknown|None assigned", NativeState("7", "CANCELLED", exit_code=0)),
    ],
)
def test_sacct_lines_are_read(line: str, expected: NativeState) -> None:
    assert read_accounting(f"{line}\n7.batch|FAILED|3:0|1|2|n1\n") == [expected]


def test_scontrol_is_read() -> None:
    text = (
        "JobId=88 JobName=a JobState=OUT_OF_MEMORY Reason=OutOfMemory Dependency=(null) ExitCode=0:125 "
        "StartTime=2026-11-23T10:00:00 EndTime=2026-11-23T10:01:00 NodeList=n3 ReqNodeList=(null)"
    )
    found = read_job(text)
    assert found is not None
    assert (found.id, found.state, found.nodes, found.signal) == ("88", "OUT_OF_MEMORY", "n3", 125)
    assert found.end_at is not None
    assert found.start_at is not None
    assert found.end_at - found.start_at == 60
    assert read_job("slurm_load_jobs error: Invalid job id specified") is None


def test_instants_are_numbers_or_local_times() -> None:
    assert read_instant("1795000000") == 1795000000.0
    assert read_instant("2026-11-23T10:00:00") == time.mktime((2026, 11, 23, 10, 0, 0, 0, 0, -1))
    assert read_instant("N/A") is read_instant("Unknown") is read_instant("") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("88\n", "88"), ("88;cluster\n", "88"), ("sbatch: warning: x\n88\n", "88"), ("", None), ("Submitted\n", None)],
)
def test_the_id_is_found_in_what_sbatch_prints(text: str, expected: str | None) -> None:
    assert accepted_id(text) == expected


@pytest.mark.parametrize(
    ("error", "is_later"),
    [
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)", True),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", True),
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates", True),
        ("sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying", True),
        ("sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed: Invalid", False),
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination", False),
        ("", False),
    ],
)
def test_which_refusals_may_pass(error: str, is_later: bool) -> None:
    assert may_be_accepted_later(error) is is_later


def test_the_words_of_an_error_come_without_their_frame() -> None:
    error = "sbatch: error: Batch job submission failed: Invalid qos specification\n"
    assert last_words(error) == "Invalid qos specification"
    assert last_words("") == "it said nothing"
    assert last_words("sbatch: error: \x1b[31mred") == "?[31mred"


def test_a_record_is_read() -> None:
    record = read_record("88\n", "job=88\nstart=100\nnode=n1\n", "job=88\nstart=100\nend=160\nexit=7\n")
    assert record == RunRecord("88", 100.0, "n1", 160.0, 7)
    assert read_record("", "", "") == RunRecord()
    assert read_record("x; rm\n", "start=-1\n", "exit=300\nend=zz\n") == RunRecord()


@given(st.text(), st.text(), st.text())
def test_no_text_raises(one: str, two: str, three: str) -> None:
    read_record(one, two, three)
    for text in (one, two, three):
        read_queue(text)
        read_accounting(text)
        read_job(text)
        accepted_id(text)
        assert last_words(text).isprintable()


def became(
    state: str | None, code: int | None = None, *, stopped: str | None = None, told: bool = False, **facts: object
) -> RunEnded | RunLost:
    known = None if state is None else NativeState("88", state, start_at=100.0, nodes="n1", **facts)  # type: ignore[arg-type]
    record = RunRecord("88", 100.0, "n1", 160.0 if code is not None else None, code, told)
    return outcome("41.1", "88", known, record, stopped, NOW)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (became("COMPLETED"), (0, None, None)),
        (became("COMPLETED", 0), (0, None, None)),
        (became("FAILED", 7), (7, None, None)),
        (became("FAILED", 137), (None, 9, None)),
        (became("FAILED", exit_code=3), (3, None, None)),
        (became("FAILED", signal=11), (None, 11, None)),
        (became("FAILED", 7, exit_code=1), (7, None, None)),
        (became(None, 7), (7, None, None)),
        (became("TIMEOUT", 143), (None, 15, "timeout")),
        (became("DEADLINE"), (None, None, "timeout")),
        (became("CANCELLED"), (None, None, "cancel")),
        (became("CANCELLED", 143), (None, 15, "cancel")),
        (became("CANCELLED", 143, stopped="requeue"), (None, 15, "requeue")),
        (became("CANCELLED", 0, stopped="cancel"), (0, None, "cancel")),
        (became("CANCELLED", 0, stopped="requeue"), (0, None, "requeue")),
        # Its handler saved its work at the signal before scancel.
        (became("COMPLETED", 0, stopped="requeue", told=True), (0, None, "requeue")),
        (became("COMPLETED", 0, stopped="cancel", told=True), (0, None, None)),
        (became("COMPLETED", 0, told=True), (0, None, None)),
        (became("PREEMPTED", 0), (0, None, "preempt")),
        # It ended by itself before scancel reached it.
        (became("COMPLETED", 0, stopped="requeue"), (0, None, None)),
        (became("COMPLETED", 0, stopped="cancel"), (0, None, None)),
        (became("PREEMPTED", 143), (None, 15, "preempt")),
        # Its command had ended, and the node failed afterwards.
        (became("NODE_FAIL", 0), (0, None, None)),
    ],
)
def test_what_becomes_of_a_run(found: RunEnded | RunLost, expected: tuple[int | None, int | None, str | None]) -> None:
    assert isinstance(found, RunEnded)
    assert (found.exit_code, found.signal, found.stopped_by) == expected
    assert found.launch_error is None


def test_memory_that_ran_out_is_a_limit() -> None:
    found = became("OUT_OF_MEMORY", 137)
    assert isinstance(found, RunEnded)
    assert (found.oom_kills, found.at_mem_limit) == (1, True)


@pytest.mark.parametrize("code", [None, 143, 1])
@pytest.mark.parametrize("state", ["NODE_FAIL", "BOOT_FAIL", "REVOKED"])
def test_a_failed_node_loses_the_run_also_where_slurm_ended_its_command(state: str, code: int | None) -> None:
    found = became(state, code)
    assert isinstance(found, RunLost)
    assert found.detail == f"Slurm's job 88 is {state} on n1"


def test_an_end_without_a_code_is_not_a_success() -> None:
    assert isinstance(became(None), RunLost)
    assert isinstance(became("FAILED"), RunLost)


def test_who_cancelled_it_is_told() -> None:
    found = became("CANCELLED", by="1001")
    assert isinstance(found, RunEnded)
    assert found.detail == "cancelled in Slurm by uid 1001"


def test_an_end_is_not_in_the_future_nor_before_its_start() -> None:
    record = RunRecord("88", 5000.0, None, 9000.0, 0)
    found = outcome("41.1", "88", None, record, None, NOW)
    assert isinstance(found, RunEnded)
    assert (found.start_at, found.end_at) == (NOW, NOW)
