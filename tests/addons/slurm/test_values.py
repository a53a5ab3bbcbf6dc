"""States, reasons, times and memory in Slurm's spelling."""

from __future__ import annotations

import pytest

from gpusched.addons.slurm import values
from gpusched.addons.slurm.job import SlurmJob
from gpusched.model.states import JobState, ReasonCode

OF_SLURM = set(
    "None Priority Resources Dependency DependencyNeverSatisfied BeginTime JobHeldUser JobHeldAdmin JobArrayTaskLimit "
    "QOSMaxWallDurationPerJobLimit "
    "AssocGrpGRESMinutes AssocMaxJobsLimit "
    "PartitionTimeLimit PartitionConfig PartitionDown "
    "ReqNodeNotAvail Licenses Reservation QOSMaxJobsPerUserLimit QOSGrpGRES "
    "QOSMaxGRESPerUser QOSMaxGRESPerJob InactiveLimit NonZeroExitCode TimeLimit JobLaunchFailure NodeDown "
    "SystemFailure DeadLine".split()
)


@pytest.mark.parametrize("reason", list(ReasonCode))
def test_every_reason_is_one_that_slurm_has(reason: ReasonCode) -> None:
    assert values.slurm_reason(reason.value) in OF_SLURM


@pytest.mark.parametrize("state", list(JobState))
def test_every_state_is_one_that_slurm_has(state: JobState) -> None:
    assert state.value in values.VALID_STATES
    assert values.long_state(values.compact_state(state.value).lower()) == state.value


@pytest.mark.parametrize("word", ["", "WAITING", "R D", "PD,R"])
def test_other_words_are_no_states(word: str) -> None:
    assert values.long_state(word) is None


@pytest.mark.parametrize(
    ("seconds", "short", "long"),
    [
        (0, "0:00", "00:00:00"),
        (9.9, "0:09", "00:00:09"),
        (600, "10:00", "00:10:00"),
        (3600, "1:00:00", "01:00:00"),
        (86400, "1-00:00:00", "1-00:00:00"),
        (90061, "1-01:01:01", "1-01:01:01"),
        (None, "UNLIMITED", "UNLIMITED"),
        (-5, "0:00", "00:00:00"),
    ],
)
def test_durations_have_the_forms_of_squeue_and_of_sacct(seconds: float | None, short: str, long: str) -> None:
    assert (values.short_duration(seconds), values.long_duration(seconds)) == (short, long)


@pytest.mark.parametrize(
    ("mib", "converted", "raw"),
    [
        (0, "0M", "0M"),
        (100, "100M", "100M"),
        (1500, "1500M", "1500M"),
        (2048, "2G", "2048M"),
        (1 << 20, "1T", "1048576M"),
    ],
)
def test_memory_is_never_rounded(mib: int, converted: str, raw: str) -> None:
    assert (values.memory(mib), values.memory(mib, convert=False)) == (converted, raw)


@pytest.mark.parametrize(("limit", "shown"), [(None, None), (60, 60), (61, 120), (90, 120)])
def test_limits_are_whole_minutes(limit: int | None, shown: int | None) -> None:
    assert SlurmJob({"time_limit_s": limit}).limit_s == shown


def test_an_exit_status_is_code_and_signal() -> None:
    assert SlurmJob({"exit_code": None, "signal": 9}).exit_status == "0:9"
    assert SlurmJob({"exit_code": 3, "signal": None}).exit_status == "3:0"


@pytest.mark.parametrize(
    ("nodes", "first"), [(None, ""), ("", ""), ("n1", "n1"), ("gpu[07-09]", "gpu07"), ("n1,lab2", "n1")]
)
def test_a_batch_script_runs_on_the_first_node_of_a_list(nodes: str | None, first: str) -> None:
    assert values.first_node(nodes) == first


def test_a_job_on_several_nodes_is_found_by_each() -> None:
    job = {"node": "gpu[07-09]"}
    assert values.is_on(job, {"gpu08"})
    assert not values.is_on(job, {"gpu10", "gpu[07-09]"})
    assert not values.is_on({"node": None}, {"gpu08"})
