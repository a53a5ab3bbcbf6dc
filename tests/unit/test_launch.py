"""From a job and a placement to a ticket: patterns, paths, environment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.daemon.launch.environment import captured, job_environment, visible_devices
from gpusched.daemon.launch.ticket import make_ticket
from gpusched.engine.launchers import ticket_facts
from gpusched.lifecycle.output_paths import expand_pattern, output_paths
from gpusched.model.execution import LaunchSite, pack_environment, unpack_environment
from gpusched.model.job import GpuShare, Job, Notice, Run
from gpusched.model.launch import SUPERVISED
from gpusched.model.settings import Settings
from gpusched.model.states import JobState, RunState
from gpusched.model.value import replace
from gpusched.testing import job as make_job

SITE = LaunchSite("lab1.example", "/run/api.sock")


def a_job(**launch: object) -> Job:
    job = make_job(42)
    spec = replace(job.spec, name="train", launch=replace(job.spec.launch, work_dir="/home/ann", **launch))
    return replace(job, user="ann", spec=spec, state=JobState.RUNNING, run=1)


def test_facts_of_a_ticket_have_what_a_supervisor_needs_of_the_launch() -> None:
    """By the names that supervisors of earlier versions read, too."""
    notice = Notice(10, 60, main_only=False)
    launch = {"argv": ("true",), "umask": 0o077, "prolog": "start.sh", "log_max_mib": 5, "log_keep": 2}
    ticket = make_ticket(a_job(**launch, notice=notice), a_run(), None, pack_environment({}), SITE, Settings(), {})
    facts = ticket_facts(ticket, "/spool")
    assert {name: facts[name] for name in SUPERVISED} == {
        **launch,
        "work_dir": "/home/ann",
        "prolog": "./start.sh",
        "epilog": None,
        "stop_signal": None,
        "notice": {"signal": 10, "before_s": 60, "main_only": False},
    }
    assert "launch" not in facts


@pytest.mark.parametrize(("most", "kept"), [(None, 0), (5, 2)])
def test_files_are_kept_only_where_output_is_rotated(most: int | None, kept: int) -> None:
    assert a_job(log_max_mib=most, log_keep=2).spec.launch.kept_files == kept


def a_run(*gpus: GpuShare, number: int = 1) -> Run:
    return Run(42, number, RunState.STARTING, "lab1.example", "boot", 0.0, gpus=gpus, stdout_path="/home/ann/out")


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("gpusched-%j.out", "gpusched-42.out"),
        ("%x-%A_%a.%N.log", "train-42_0.lab1.log"),
        ("%5j", "00042"),
        ("%99999j", "0000000042"),
        ("100%%", "100%"),
        ("%u/%x", "ann/train"),
        ("%q %", "%q %"),
        ("%J.%s.%n.%t", "42.batch.0.0"),
    ],
)
def test_patterns_expand_as_in_slurm(pattern: str, path: str) -> None:
    assert expand_pattern(pattern, a_job(), "lab1.example") == path


def test_a_mig_instance_is_always_named_by_uuid() -> None:
    run = a_run(GpuShare("MIG-7", 1001))
    assert visible_devices(run, "index", {"MIG-7": 1001}) == "MIG-7"


def test_a_name_cannot_lead_the_file_elsewhere() -> None:
    job = a_job()
    job = replace(job, spec=replace(job.spec, name="../../etc/passwd"))
    assert expand_pattern("%x", job, "n") == ".._.._etc_passwd"


@pytest.mark.parametrize(
    ("launch", "run", "paths"),
    [
        ({}, 1, ("/home/ann/gpusched-42.out", None)),
        ({}, 3, ("/home/ann/gpusched-42.out.3", None)),
        ({"stdout": "/abs/%x", "stderr": "e"}, 2, ("/abs/train.2", "/home/ann/e.2")),
        ({"stdout": "log", "open_mode": "append"}, 2, ("/home/ann/log", None)),
        ({"stdout": "log", "open_mode": "truncate"}, 2, ("/home/ann/log", None)),
        ({"stdout": "/dev/null"}, 2, ("/dev/null", None)),
        ({"stdout": "../up/./x"}, 1, ("/home/up/x", None)),
        ({"stdout": ".."}, 1, ("/home", None)),
        ({"stdout": "%x%%%8j%q", "submit_dir": "/a/../b//c/"}, 2, ("/b/c/train%00000042%q.2", None)),
        ({"stdout": "log", "submit_dir": "/"}, 1, ("/log", None)),
    ],
)
def test_output_paths_are_expanded(launch: dict[str, object], run: int, paths: tuple[str, str | None]) -> None:
    assert output_paths(a_job(**launch), run, "n", "gpusched-%j.out") == paths


@pytest.mark.parametrize(
    "pattern",
    [
        "gpusched-%j.out",
        "%j",
        "%J.%A%%",
        "%5j",
        "%x-%j",
        "out",
        ".",
        "..",
        "%%",
        "a/%j",
        "../%j",
        "/dev/null",
        "%",
        "%q%j",
    ],
)
def test_short_ways_to_paths_lead_to_the_same_ones(pattern: str) -> None:
    paths = [output_paths(a_job(stdout=pattern, stderr=stderr), 1, "n", "x")[0] for stderr in (None, "err")]
    assert paths[0] == paths[1]


ENVIRONMENTS = st.dictionaries(
    st.text(st.characters(blacklist_characters="\0=", blacklist_categories=["Cs"]), min_size=1),
    st.binary().map(lambda raw: raw.replace(b"\0", b"").decode("utf-8", "surrogateescape")),
)


@given(ENVIRONMENTS)
def test_environments_survive_storage_byte_for_byte(env: dict[str, str]) -> None:
    assert unpack_environment(pack_environment(env)) == env


CARDS = (GpuShare("GPU-b", 1), GpuShare("GPU-a", 0))


def test_visible_devices_are_looked_up_at_launch() -> None:
    run = a_run(*CARDS)
    assert visible_devices(run, "index", {"GPU-a": 3, "GPU-b": 4}) == "4,3"
    assert visible_devices(run, "uuid", {"GPU-a": 3, "GPU-b": 4}) == "GPU-b,GPU-a"
    assert visible_devices(run, "index", {"GPU-a": 3}) == "GPU-b,GPU-a"
    assert visible_devices(a_run(), "index", {}) == ""


def test_a_job_without_gpus_sees_none_and_its_environment_says_so() -> None:
    base = captured(pack_environment({"CUDA_VISIBLE_DEVICES": "7"}))
    env = job_environment(a_job(), a_run(), base, SITE, Settings(), {})
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "SLURM_JOB_GPUS" not in env


def test_variables_of_an_enclosing_job_do_not_leak() -> None:
    env = job_environment(a_job(), a_run(), captured(b"SLURM_PROCID=5\0SLURM_ARRAY_JOB_ID=1\0"), SITE, Settings(), {})
    assert env["SLURM_PROCID"] == "0"
    assert "SLURM_ARRAY_JOB_ID" not in env


def test_threads_follow_the_cores_unless_the_user_chose() -> None:
    assert job_environment(a_job(), a_run(), {}, SITE, Settings(), {})["OMP_NUM_THREADS"] == "1"
    base = {"OMP_NUM_THREADS": "9"}
    assert job_environment(a_job(), a_run(), base, SITE, Settings(), {})["OMP_NUM_THREADS"] == "9"


def test_a_repeated_run_knows_its_previous_runs() -> None:
    job = replace(a_job(), run=3)
    base = {"GPUSCHED_PREVIOUS_SIGNAL": "of the job that submitted this one"}
    past = {"GPUSCHED_PREVIOUS_EXIT_CODE": "9"}
    env = job_environment(job, a_run(number=3), captured(pack_environment(base)), SITE, Settings(), {}, past)
    assert "GPUSCHED_PREVIOUS_SIGNAL" not in env
    assert (env["SLURM_RESTART_COUNT"], env["GPUSCHED_PREVIOUS_EXIT_CODE"]) == ("2", "9")


def test_a_ticket_combines_default_settings_and_job_requests() -> None:
    settings = Settings()
    ticket = make_ticket(a_job(), a_run(*CARDS), None, pack_environment({"A": "1"}), SITE, settings, {})
    assert (ticket.run, ticket.grace_s, ticket.launch.stop_signal) == ("42.1", settings.life.grace_s, None)
    assert ticket.env["A"] == "1"
    assert ticket.has_gpus
    assert (ticket.stdout_path, ticket.stderr_path) == ("/home/ann/out", None)
    assert not ticket.append
    assert ticket.limit_grace_s == ticket.grace_s
    patient = make_ticket(a_job(grace_s=86400.0), a_run(), None, b"", SITE, settings, {})
    assert (patient.grace_s, patient.limit_grace_s) == (86400.0, settings.life.limit_grace_s)
    wishes = a_job(grace_s=1.5, stop_signal=2, open_mode="append")
    ticket = make_ticket(wishes, a_run(), b"#!/bin/sh\n", b"", SITE, settings, {})
    assert (ticket.grace_s, ticket.launch.stop_signal, ticket.append, ticket.has_gpus) == (1.5, 2, True, False)
