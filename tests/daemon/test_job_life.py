"""The life of a job, with real processes: limits, retries, holds, cancels, outputs, environment."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from harness import Daemon
from support import is_alive, wait_until

from gpusched.errors import Refused, UsageError


def test_a_command_runs_with_its_exact_arguments(daemon: Daemon) -> None:
    job_id = daemon.submit("/bin/sh", "-c", 'printf "%s|" "$@"', "x", "a b", "$HOME", "", "ü\n*")
    (job,) = daemon.wait(job_id)
    assert (job["state"], job["exit_code"], job["run"]) == ("COMPLETED", 0, 1)
    assert daemon.output(job_id) == "a b|$HOME||ü\n*|"


def test_a_script_runs_from_a_copy_made_at_submission(daemon: Daemon) -> None:
    script = "#!/bin/sh\necho first version $1\n"
    job_id = daemon.submit("arg", script=script, script_name="train.sh", hold=True)
    daemon.call("POST", "/v1/jobs/release", {"ids": [job_id]})
    (job,) = daemon.wait(job_id)
    assert daemon.output(job_id) == "first version arg\n"
    assert job["name"] == "train.sh"


@pytest.mark.parametrize("name", ["work_dir", "submit_dir", "script_path"])
def test_a_relative_path_is_refused(daemon: Daemon, name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is 'here'; it must be absolute"):
        daemon.submit(script="#!/bin/sh\n", **{name: "here"})


@pytest.mark.parametrize("code", [1, 2, 127, 255])
def test_the_exit_code_is_recorded(daemon: Daemon, code: int) -> None:
    (job,) = daemon.wait(daemon.submit("/bin/sh", "-c", f"exit {code}"))
    assert (job["state"], job["exit_code"], job["signal"]) == ("FAILED", code, None)
    assert job["reason"] == "NonZeroExitCode"


def test_a_terminating_signal_is_recorded(daemon: Daemon) -> None:
    (job,) = daemon.wait(daemon.submit("/bin/sh", "-c", "kill -SEGV $$"))
    assert (job["state"], job["exit_code"], job["signal"]) == ("FAILED", None, signal.SIGSEGV)
    assert job["reason"] == "RaisedSignal"


def test_a_time_limit_ends_the_whole_tree(daemon: Daemon, tmp_path: Path) -> None:
    pidfile = tmp_path / "pid"
    # The grandchild left the session and ignores TERM: only KILL to the whole tree ends it.
    inner = f"trap '' TERM; echo $$ > {pidfile}; while :; do sleep 0.05; done"
    job_id = daemon.submit(
        "/bin/sh",
        "-c",
        f'setsid sh -c "{inner.replace("$$", chr(92) + "$$")}" & wait',
        time_limit_s=3600,
        grace_s=0.2,
    )
    wait_until(lambda: pidfile.exists() and pidfile.read_text(), what="the grandchild to begin")
    daemon.call("POST", "/v1/jobs/update", {"ids": [job_id], "changes": {"time_limit_s": 1}})
    (job,) = daemon.wait(job_id)
    assert (job["state"], job["reason"]) == ("TIMEOUT", "TimeLimit")
    assert not is_alive(int(pidfile.read_text()))
    assert "TIME LIMIT" in daemon.output(job_id)


def test_cancel_sends_term_then_kill(daemon: Daemon) -> None:
    script = "trap 'echo got TERM' TERM; echo ready; while :; do sleep 0.05; done"
    job_id = daemon.submit("/bin/sh", "-c", script, grace_s=2)
    wait_until(lambda: "ready" in daemon.output(job_id), what="the job to set its trap")
    answer = daemon.call("POST", "/v1/jobs/cancel", {"ids": [job_id]})
    assert answer["cancelled"] == [job_id]
    (job,) = daemon.wait(job_id)
    assert (job["state"], job["reason"]) == ("CANCELLED", "CancelledByUser")
    assert "got TERM" in daemon.output(job_id)


def test_a_signal_is_delivered_without_ending_the_job(daemon: Daemon) -> None:
    script = "trap 'echo got USR1; exit 5' USR1; echo ready; while :; do sleep 0.02; done"
    job_id = daemon.submit("/bin/bash", "-c", script)
    wait_until(lambda: "ready" in daemon.output(job_id), what="the job to set its trap")
    body = {"ids": [job_id], "signal": int(signal.SIGUSR1), "main_only": True}
    assert daemon.call("POST", "/v1/jobs/cancel", body)["signalled"] == [job_id]
    (job,) = daemon.wait(job_id)
    assert (job["state"], job["exit_code"]) == ("FAILED", 5)
    assert "got USR1" in daemon.output(job_id)


def test_a_notice_precedes_the_time_limit(daemon: Daemon) -> None:
    script = "trap 'echo noticed; exit 0' USR1; while :; do sleep 0.02; done"
    # Three seconds after the start, which is long enough to set a trap.
    notice = {"signal": int(signal.SIGUSR1), "before_s": 57, "main_only": True}
    (job,) = daemon.wait(daemon.submit("/bin/bash", "-c", script, time_limit_s=60, notice=notice))
    assert job["state"] == "COMPLETED"
    assert "noticed" in daemon.output(job["id"])


def test_a_failed_job_is_retried_and_no_log_is_overwritten(daemon: Daemon, tmp_path: Path) -> None:
    marker = tmp_path / "tries"
    script = f"echo x >> {marker}; n=$(wc -l < {marker}); echo try $n $SLURM_RESTART_COUNT; [ $n -ge 3 ]"
    job_id = daemon.submit("/bin/sh", "-c", script, retries=5, backoff_s=0.05, stdout="%x-%j.log", name="again")
    (job,) = daemon.wait(job_id)
    assert (job["state"], job["run"], job["failures"], job["restarts"]) == ("COMPLETED", 3, 2, 2)
    base = daemon.home / f"again-{job_id}.log"
    assert base.read_text() == "try 1\n"
    assert Path(f"{base}.2").read_text() == "try 2 1\n"
    assert Path(f"{base}.3").read_text() == "try 3 2\n"
    assert [run["exit_code"] for run in job["runs"]] == [1, 1, 0]


def test_append_keeps_all_runs_in_one_file(daemon: Daemon, tmp_path: Path) -> None:
    marker = tmp_path / "tries"
    script = f"echo x >> {marker}; n=$(wc -l < {marker}); echo try $n; [ $n -ge 2 ]"
    job_id = daemon.submit("/bin/sh", "-c", script, retries=2, backoff_s=0, open_mode="append", stdout="out.log")
    daemon.wait(job_id)
    assert (daemon.home / "out.log").read_text() == "try 1\ntry 2\n"


def test_retries_are_for_the_named_classes_only(daemon: Daemon) -> None:
    (job,) = daemon.wait(daemon.submit("/bin/sh", "-c", "exit 7", retries=3, backoff_s=0, retry_on=["8-20", "signal"]))
    assert (job["state"], job["run"]) == ("FAILED", 1)


def test_a_held_job_waits_until_it_is_released(daemon: Daemon) -> None:
    job_id = daemon.submit("/bin/true", hold=True)
    job = daemon.job(job_id)
    assert (job["state"], job["reason"]) == ("PENDING", "JobHeldUser")
    assert daemon.call("POST", "/v1/jobs/release", {"ids": [job_id]})["changed"] == [job_id]
    assert daemon.wait(job_id)[0]["state"] == "COMPLETED"


def test_a_job_does_not_start_before_its_begin_time(daemon: Daemon) -> None:
    begin_at = daemon.call("GET", "/v1/status")["daemon"]["now"] + 0.7
    job_id = daemon.submit("/bin/true", begin_at=begin_at)
    assert daemon.job(job_id)["reason"] == "BeginTime"
    (job,) = daemon.wait(job_id)
    assert job["start_at"] >= begin_at


def test_dependants_follow_the_end_of_their_parents(daemon: Daemon) -> None:
    good = daemon.submit("/bin/true", hold=True)
    bad = daemon.submit("/bin/false", hold=True)
    after_good = daemon.submit("/bin/true", dependency=f"afterok:{good}")
    after_bad = daemon.submit("/bin/true", dependency=f"afterok:{bad}")
    after_any = daemon.submit("/bin/true", dependency=f"afterany:{good}:{bad}")
    assert daemon.job(after_good)["reason"] == "Dependency"
    daemon.call("POST", "/v1/jobs/release", {"ids": [good, bad]})
    first, second, third = daemon.wait(after_good, after_bad, after_any)
    assert first["state"] == "COMPLETED"
    assert (second["state"], second["reason"]) == ("CANCELLED", "DependencyNeverSatisfied")
    assert third["state"] == "COMPLETED"
    assert third["start_at"] >= daemon.job(bad)["end_at"]


def test_unknown_and_circular_dependencies_are_refused(daemon: Daemon) -> None:
    with pytest.raises(Refused, match="no job 999"):
        daemon.submit("/bin/true", dependency="afterok:999")
    first = daemon.submit("/bin/true", hold=True)
    second = daemon.submit("/bin/true", dependency=f"afterok:{first}")
    with pytest.raises(Refused, match="wait for each other"):
        daemon.call("POST", "/v1/jobs/update", {"ids": [first], "changes": {"dependency": f"afterok:{second}"}})


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"work_dir": "/nonexistent/dir"}, "/nonexistent/dir"),
        ({"stdout": "/dev/null/out"}, "/dev/null/out"),
        ({"argv": ["/no/such/program"]}, "/no/such/program"),
        ({"script": "#!/no/such/interpreter\n"}, "script"),
    ],
)
def test_a_failed_launch_records_its_reason_and_the_daemon_continues(
    daemon: Daemon, spec: dict[str, object], says: str
) -> None:
    if "script" not in spec:
        spec.setdefault("argv", ["/bin/true"])
    job_id = daemon.submit(**spec, retries=2)
    (job,) = daemon.wait(job_id)
    assert (job["state"], job["reason"], job["run"]) == ("FAILED", "JobLaunchFailure", 1)
    assert says in job["reason_text"]
    assert daemon.wait(daemon.submit("/bin/true"))[0]["state"] == "COMPLETED"


def test_a_symlinked_output_file_is_not_followed(daemon: Daemon, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("keep")
    (daemon.home / "link").symlink_to(target)
    (job,) = daemon.wait(daemon.submit("/bin/echo", "overwritten", stdout="link"))
    assert (job["state"], job["reason"]) == ("FAILED", "JobLaunchFailure")
    assert target.read_text() == "keep"


def test_the_environment_is_captured_and_completed(gpu_daemon: Daemon) -> None:
    job_id = gpu_daemon.submit("/usr/bin/env", env={"MY": "v=1 \udcff", "SLURM_JOB_ID": "stale"}, gpus=2)
    gpu_daemon.wait(job_id)
    raw = Path(gpu_daemon.job(job_id)["stdout_path"]).read_bytes()
    env = dict(line.split(b"=", 1) for line in raw.splitlines())
    assert env[b"MY"] == b"v=1 \xff"
    assert env[b"CUDA_VISIBLE_DEVICES"] == b"0,1"
    assert env[b"CUDA_DEVICE_ORDER"] == b"PCI_BUS_ID"
    assert env[b"GPUSCHED_JOB_ID"] == env[b"SLURM_JOB_ID"] == job_id.encode()
    assert b"SLURM_RESTART_COUNT" not in env


def test_a_job_without_gpus_sees_none(gpu_daemon: Daemon) -> None:
    job_id = gpu_daemon.submit("/bin/sh", "-c", 'echo "[${CUDA_VISIBLE_DEVICES-unset}]"')
    gpu_daemon.wait(job_id)
    assert gpu_daemon.output(job_id) == "[]\n"


def test_gpu_out_of_memory_is_a_separate_state(gpu_daemon: Daemon) -> None:
    text = "RuntimeError: CUDA out of memory. Tried to allocate 20.00 GiB"
    (job,) = gpu_daemon.wait(gpu_daemon.submit("/bin/sh", "-c", f"echo '{text}' >&2; exit 1", gpus=1))
    assert (job["state"], job["reason"], job["exit_code"]) == ("OUT_OF_MEMORY", "OutOfMemory", 1)


def test_slices_share_a_gpu_and_whole_jobs_do_not(gpu_daemon: Daemon) -> None:
    slices = [gpu_daemon.submit("/bin/sleep", "1000", vram_mib=8192) for _ in range(2)]
    whole = gpu_daemon.submit("/bin/sleep", "1000", gpus=3)
    for job_id in (*slices, whole):
        gpu_daemon.wait_state(job_id, "RUNNING")
    cards = [{gpu["uuid"] for gpu in gpu_daemon.job(job_id)["gpus"]} for job_id in (*slices, whole)]
    assert cards[0] == cards[1]
    assert len(cards[0]) == 1
    assert not cards[0] & cards[2]
    waiting = gpu_daemon.submit("/bin/true", gpus=1)
    job = gpu_daemon.job(waiting)
    assert (job["state"], job["reason"]) == ("PENDING", "Resources")
    assert "GPU" in job["reason_text"]


def test_an_impossible_request_is_refused_with_the_largest_possible_one(gpu_daemon: Daemon) -> None:
    with pytest.raises(Refused, match="9 GPUs.*-g 4"):
        gpu_daemon.submit("/bin/true", gpus=9)
    assert gpu_daemon.call("GET", "/v1/jobs?states=all")["jobs"] == []


def test_a_drained_gpu_is_not_used_and_the_reason_says_so(gpu_daemon: Daemon) -> None:
    gpu_daemon.call("POST", "/v1/drain", {"targets": ["0", "1"], "message": "fan"})
    job_id = gpu_daemon.submit("/bin/true", gpus=3)
    job = gpu_daemon.job(job_id)
    assert (job["state"], job["reason"]) == ("PENDING", "ReqNodeNotAvail")
    assert "drained" in job["reason_text"]
    states = {gpu["index"]: gpu["state"] for gpu in gpu_daemon.call("GET", "/v1/cluster")["gpus"]}
    assert states[0] == states[1] == "drained"
    gpu_daemon.kill()
    gpu_daemon.start()
    assert gpu_daemon.job(job_id)["state"] == "PENDING"
    gpu_daemon.call("POST", "/v1/undrain", {"targets": ["0", "1"]})
    assert gpu_daemon.wait(job_id)[0]["state"] == "COMPLETED"


def test_leftovers_are_ended_and_named(daemon: Daemon, tmp_path: Path) -> None:
    pidfile = tmp_path / "pid"
    job_id = daemon.submit("/bin/sh", "-c", f"setsid sleep 1000 & echo $! > {pidfile}; exit 0")
    (job,) = daemon.wait(job_id)
    assert (job["state"], job["exit_code"]) == ("COMPLETED", 0)
    assert not is_alive(int(pidfile.read_text()))
    assert any("sleep(" in event["text"] for event in job["events"])


def test_the_time_limit_of_a_running_job_can_be_changed(daemon: Daemon) -> None:
    job_id = daemon.submit("/bin/sleep", "1000", time_limit_s=3600, grace_s=0)
    daemon.wait_state(job_id, "RUNNING")
    daemon.call("POST", "/v1/jobs/update", {"ids": [job_id], "changes": {"time_limit_s": 1}})
    assert daemon.wait(job_id)[0]["state"] == "TIMEOUT"


def test_a_batch_is_recorded_atomically_and_in_order(daemon: Daemon) -> None:
    lines = [f"echo {number} && exit {number % 2}" for number in range(20)]
    ids = daemon.call("POST", "/v1/jobs", {"spec": daemon.spec(), "batch": lines})["ids"]
    assert ids == list(range(ids[0], ids[0] + 20))
    jobs = daemon.wait(*map(str, ids))
    assert [job["exit_code"] for job in jobs] == [number % 2 for number in range(20)]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"argv": []}, "no command"),
        ({"argv": ["a\0b"]}, "NUL"),
        ({"argv": ["true"], "colour": "red"}, "colour"),
        ({"argv": ["true"], "gpus": -1}, "at least 0"),
        ({"argv": ["true"], "gpus": 10**12}, "at most"),
        ({"argv": ["true"], "gpus": 1.5}, "whole number"),
        ({"argv": ["true"], "cpus": float("nan")}, "number"),
        ({"argv": ["true"], "time_limit_s": 0}, "at least 1"),
        ({"argv": ["true"], "nice": 10001}, "at most"),
        ({"argv": ["true"], "work_dir": "relative"}, "absolute"),
        ({"argv": ["true"], "gpu_fraction": 0.5, "vram_mib": 5}, "cannot be combined"),
        ({"argv": ["true"], "env": {"A=B": "x"}}, "cannot be passed on"),
        ({"argv": ["true"], "name": "x" * 1000}, "1000 characters"),
        ({"script": "echo no shebang\n"}, "#!"),
        ({"argv": ["true"], "retry_on": ["sometimes"]}, "sometimes"),
        ({"argv": ["true"], "dependency": "whenever:1"}, "whenever"),
    ],
)
def test_an_unreadable_submission_is_refused_and_not_recorded(
    daemon: Daemon, spec: dict[str, object], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        daemon.call("POST", "/v1/jobs", {"spec": {"work_dir": "/", "cpus": 0, **spec}})
    assert daemon.call("GET", "/v1/jobs?states=all")["jobs"] == []


def test_a_script_of_ten_megabytes_is_refused(daemon: Daemon) -> None:
    with pytest.raises(Refused, match="10.0 MiB"):
        daemon.submit(script="#!/bin/sh\n" + "#" * (10 << 20))


def test_the_daemon_survives_its_own_environment(daemon: Daemon) -> None:
    huge = {f"K{number}": "v" * 1000 for number in range(2000)}
    with pytest.raises(Refused, match="environment"):
        daemon.submit("/bin/true", env=huge)
    assert os.path.exists(daemon.home / "run" / "api.sock")


def test_a_notice_to_all_spares_the_shell_of_the_script(daemon: Daemon) -> None:
    inner = "trap 'echo saved; exit 0' USR1; echo ready; while :; do :; done"
    script = f'#!/bin/bash\nbash -c "{inner}"\necho "and the script goes on"\n'
    job_id = daemon.submit(script=script, stdout="out")
    wait_until(lambda: "ready" in daemon.output(job_id), what="the program to set its trap")
    daemon.call("POST", "/v1/jobs/cancel", {"ids": [job_id], "signal": int(signal.SIGUSR1)})
    (job,) = daemon.wait(job_id)
    assert (job["state"], daemon.output(job_id)) == ("COMPLETED", "ready\nsaved\nand the script goes on\n")


def test_a_notice_reaches_a_script_that_execs_its_program(daemon: Daemon) -> None:
    program = "trap 'echo saved; exit 0' USR1; echo ready; while :; do :; done"
    job_id = daemon.submit(script=f'#!/bin/bash\nexec bash -c "{program}"\n', stdout="out")
    wait_until(lambda: "ready" in daemon.output(job_id), what="the program to set its trap")
    daemon.call("POST", "/v1/jobs/cancel", {"ids": [job_id], "signal": int(signal.SIGUSR1)})
    assert daemon.wait(job_id)[0]["state"] == "COMPLETED"
