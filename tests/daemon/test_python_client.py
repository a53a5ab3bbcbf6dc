"""gpusched.Client: typed answers, waiting, logs, what goes wrong, and what importing the package costs."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from harness import Daemon
from support import wait_until

import gpusched
from gpusched.api.render import JOB_FIELDS
from gpusched.api.schema import SPEC_FIELDS, UPDATE_FIELDS
from gpusched.errors import DaemonUnreachable, NotFound, Refused, UsageError, WaitTimeout
from gpusched.sdk.job_options import JobOptions
from gpusched.sdk.options import CHANGES, OPTIONS, changes_of, spec_of
from gpusched.sdk.values import JobInfo


@pytest.fixture
def client(daemon: Daemon) -> Iterator[gpusched.Client]:
    with gpusched.Client(daemon.home / "run" / "api.sock") as made:
        yield made


def test_importing_the_package_loads_nothing_of_the_api() -> None:
    code = "import sys; before = set(sys.modules); import gpusched; print(*(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(loaded) == {"gpusched"}
    code = "import sys, gpusched.cli.gsub; print(*(name for name in sys.modules if '.sdk' in name))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == []


def test_the_package_exports_exactly_its_public_names() -> None:
    for name in gpusched.__all__:
        assert getattr(gpusched, name) is not None
        assert name in dir(gpusched)
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = gpusched.nothing_such  # type: ignore[attr-defined]


def test_a_job_runs_from_submission_to_its_result(client: gpusched.Client, daemon: Daemon) -> None:
    job = client.submit(["sh", "-c", "echo out; exit 3"], cpus=0, name="three", time="1h", chdir=daemon.home)
    assert (job.name, job.time_limit_s, job.work_dir) == ("three", 3600, str(daemon.home))
    ended = client.wait(job)
    assert (ended.state, ended.result_code, ended.is_final) == (gpusched.JobState.FAILED, 3, True)
    assert [(run.run, run.exit_code, run.outcome) for run in ended.runs] == [(1, 3, gpusched.JobState.FAILED)]
    assert ended.events[0].kind == "submitted"
    assert list(client.logs(ended)) == ["out\n"]


def test_result_codes_match_gsub_wait(client: gpusched.Client) -> None:
    lines = ["true", "exit 7", "kill -TERM $$", "sleep 100"]
    jobs = [client.submit(line, cpus=0, output="/dev/null") for line in lines]
    assert jobs[3].result_code is None
    # A job is RUNNING before its command is: one that was cancelled in between has no signal.
    wait_until(lambda: (runs := client.job(jobs[3]).runs) and runs[-1].start_at, what="the sleep to run")
    assert client.cancel(jobs[3]) == [jobs[3].id]
    assert [job.result_code for job in client.wait(jobs, timeout_s=60)] == [0, 7, 143, 143]


def test_a_script_takes_arguments_and_an_environment(client: gpusched.Client, tmp_path: Path) -> None:
    script = tmp_path / "s.sh"
    script.write_text('#!/bin/sh\necho "$1 $A $B"\n')
    options: Any = {"env": {"A": "1", "PATH": "/bin"}, "extra_env": {"B": "2"}}
    job = client.submit(script=script, args=["x y"], cpus=0, chdir=tmp_path, **options)
    assert "".join(client.logs(job, follow=True)) == "x y 1 2\n"


def test_lines_under_a_key_are_submitted_once(client: gpusched.Client) -> None:
    options: dict[str, Any] = {"cpus": 0, "hold": True, "output": "/dev/null"}
    ids = client.submit_all(["true", "false"], key="lines", **options)
    assert client.submit_all(["true", "false"], key="lines", **options) == ids
    for job_id in ids:
        client.cancel(job_id)
    assert client.submit_all(["true", "false"], key="lines", key_again="failed", **options) != ids
    with pytest.raises(UsageError, match="needs a key"):
        client.submit_all(["true"], key_again="failed", **options)


def test_many_lines_are_read_at_once(client: gpusched.Client) -> None:
    ids = client.submit_all(["true", "false"], cpus=0, output="/dev/null")
    assert [job.result_code for job in client.wait(ids)] == [0, 1]


def test_jobs_are_listed_by_filters(client: gpusched.Client) -> None:
    held = [client.submit("true", hold=True, name=f"n{n}") for n in range(3)]
    for found in (client.jobs(), client.jobs(states=["PENDING"]), client.jobs(ids=held)):
        assert [job.id for job in found] == [job.id for job in held]
    assert [job.name for job in client.jobs(names=["n1", "n2"], limit=1)] == ["n2"]
    assert client.jobs(states=["COMPLETED"]) == []
    assert client.jobs(ids=[]) == []


def test_keys_and_repeats_work(client: gpusched.Client) -> None:
    first = client.submit("true", key="k", hold=True, cpus=0)
    again = client.submit("true", key="k", hold=True, cpus=0)
    assert (first.existing, again.existing, again.id) == (False, True, first.id)
    copy = client.resubmit(first, extra_env={"X": "1"}, name="copy", output="/dev/null")
    assert (copy.name, copy.key, copy.work_dir) == ("copy", None, first.work_dir)
    assert client.wait(copy).result_code == 0


def test_jobs_are_held_released_and_updated(client: gpusched.Client) -> None:
    job = client.submit("true", hold=True, cpus=0, output="/dev/null")
    client.update(job, time_limit_s=60, name="new")
    client.release(job)
    ended = client.wait(job)
    assert (ended.name, ended.time_limit_s, ended.result_code) == ("new", 60, 0)


def test_jobs_cannot_be_charged_to_another_user(client: gpusched.Client) -> None:
    me = client.job(client.submit("true", hold=True)).account
    with pytest.warns(UserWarning, match="no accounts or QOS are configured, so account somebody-else and QOS high"):
        job = client.submit("true", hold=True, account="somebody-else", qos="high")
    assert (job.account, job.charged_account, job.qos) == ("somebody-else", me, "high")
    client.update(job, account="another", qos=None)
    found = client.job(job)
    assert (found.account, found.charged_account, found.qos) == ("another", me, None)


def test_waiting_times_out(client: gpusched.Client) -> None:
    job = client.submit("true", hold=True)
    with pytest.raises(WaitTimeout, match=f"not ended in time: {job.id}"):
        client.wait(job, timeout_s=0.05)
    with pytest.raises(TimeoutError):
        list(client.as_completed([job], timeout_s=0.05))


def test_jobs_are_yielded_as_they_end_with_ended_ones_first(client: gpusched.Client) -> None:
    done = client.wait(client.submit("true", cpus=0, output="/dev/null"))
    held = [client.submit("true", hold=True, cpus=0, output="/dev/null") for _ in range(2)]
    found = client.as_completed([*held, done])
    assert next(found).id == done.id
    for job in reversed(held):
        client.release(job)
        assert next(found).id == job.id
    with pytest.raises(NotFound):
        next(client.as_completed(["99999"]))


def test_ends_during_a_daemon_outage_are_seen(client: gpusched.Client, daemon: Daemon, tmp_path: Path) -> None:
    job = client.submit(f"while [ ! -e {tmp_path}/go ]; do sleep 0.01; done", cpus=0, output="/dev/null")
    daemon.wait_state(job.id, "RUNNING")
    seen: list[str] = []
    waiter = threading.Thread(target=lambda: seen.extend(ended.id for ended in client.as_completed([job])))
    waiter.start()
    daemon.kill()
    (tmp_path / "go").touch()
    daemon.start()
    waiter.join(timeout=60)
    assert seen == [job.id]


def test_output_is_followed_through_retries(client: gpusched.Client, tmp_path: Path) -> None:
    line = "echo begin; [ -e tried ] && { printf end; exit 0; }; touch tried; exit 1"
    job = client.submit(line, cpus=0, retries=1, backoff=0, chdir=tmp_path)
    assert list(client.logs(job, follow=True)) == ["begin\n", "begin\n", "end"]
    assert list(client.logs(job, run=1)) == ["begin\n"]
    assert list(client.logs(job, lines=1)) == ["end"]
    with pytest.raises(NotFound, match="no run 9"):
        client.logs(job, run=9)


def test_one_run_is_followed_to_its_end(client: gpusched.Client, tmp_path: Path) -> None:
    line = "n=$(cat n 2>/dev/null); echo x$n; echo $n+ > n; while [ ! -e go$n ]; do sleep 0.01; done; exit 1"
    job = client.submit(line, cpus=0, retries=1, backoff=0, chdir=tmp_path)
    (tmp_path / "go").touch()
    assert list(client.logs(job, follow=True, run=1)) == ["x\n"], "while the second one runs"
    second = client.logs(job, follow=True, run=2)
    assert next(second) == "x+\n"
    current = client.logs(job, follow=True, lines=5)
    assert next(current) == "x+\n"
    (tmp_path / "go+").touch()
    assert [*second, *current] == []
    with pytest.raises(NotFound, match="no run 3"):
        list(client.logs(job, follow=True, run=3))


def test_a_line_without_a_newline_arrives_in_parts(client: gpusched.Client, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a\n" + "b\u20ac" * 1_200_000 + "\nc")
    job = client.submit("true", cpus=0, output=tmp_path / "out", open_mode="append")
    client.wait(job)
    first, *parts, last = client.logs(job)
    assert (first, last) == ("a\n", "c")
    assert len(parts) > 3
    assert max(map(len, parts)) < 2 << 20
    assert "".join(parts) == "b\u20ac" * 1_200_000 + "\n", "cut between signs"


def test_an_array_has_no_output_of_its_own(client: gpusched.Client, tmp_path: Path) -> None:
    job = client.submit("echo $SLURM_ARRAY_TASK_ID", cpus=0, array="3-4", chdir=tmp_path)
    for follow in (False, True):
        with pytest.raises(UsageError, match="is an array"):
            client.logs(job, follow=follow)
    assert list(client.logs(f"{job.id}_4", follow=True)) == ["4\n"]


def test_a_job_that_ended_before_its_start_has_no_output(client: gpusched.Client) -> None:
    job = client.submit("true", hold=True)
    client.cancel(job)
    with pytest.raises(Refused, match=r"has no output: cancelled by \w+") as caught:
        client.logs(job)
    assert caught.value.hint == f"see: gshow {job.id}"
    assert list(client.logs(job, follow=True)) == []


def test_rotated_output_comes_first(client: gpusched.Client, tmp_path: Path) -> None:
    job = client.submit("seq 1 300000", cpus=0, log_max="1M", log_keep=5, chdir=tmp_path)
    numbers = [f"{number}\n" for number in range(1, 300_001)]
    assert list(client.logs(job, follow=True)) == numbers
    assert len(list(tmp_path.glob("*.old*"))) == 1
    assert list(client.logs(job)) == numbers
    assert list(client.logs(job, lines=200_000)) == numbers[-200_000:]


def test_a_job_reports_its_progress(client: gpusched.Client, tmp_path: Path) -> None:
    line = 'echo "1/4 of it" > "$GPUSCHED_PROGRESS"; echo said; exec sleep 1000'
    job = client.submit(line, cpus=0, chdir=tmp_path)
    assert next(client.logs(job, follow=True)) == "said\n"
    found = client.job(job)
    assert (found.progress, found.progress_text) == (0.25, "1/4 of it")
    client.cancel(job)


def test_a_job_has_no_output_before_its_start(client: gpusched.Client) -> None:
    with pytest.raises(Refused, match="has not started"):
        client.logs(client.submit("true", hold=True))


def test_threads_have_separate_connections(client: gpusched.Client) -> None:
    held = client.submit("true", hold=True, cpus=0, output="/dev/null")
    waiter = threading.Thread(target=client.wait, args=(held,))
    waiter.start()
    # Would not be answered before the wait is over, were it on the same connection.
    assert client.jobs()[0].id == held.id
    client.release(held)
    waiter.join(timeout=60)
    assert not waiter.is_alive()


def test_errors_carry_a_message_and_a_hint(client: gpusched.Client) -> None:
    with pytest.raises(Refused) as caught:
        client.submit("true", gpus=1000)
    assert caught.value.message
    assert caught.value.hint
    with pytest.raises(UsageError, match="mem='lots'"):
        client.submit("true", mem="lots")
    with pytest.raises(UsageError, match="a command or a script"):
        client.submit()
    with pytest.raises(NotFound, match="no job 99999"):
        client.job(99999)


def test_a_missing_daemon_is_an_error_at_once(tmp_path: Path) -> None:
    with gpusched.Client(tmp_path / "none") as client, pytest.raises(DaemonUnreachable):
        client.jobs()


def test_a_submission_with_a_key_is_retried_across_a_restart(client: gpusched.Client, daemon: Daemon) -> None:
    first = client.submit("true", key="r", hold=True)
    daemon.kill()
    starter = threading.Timer(0.3, daemon.start)
    starter.start()
    assert client.submit("true", key="r", hold=True).id == first.id
    starter.join()


def test_the_end_feed_reports_gaps(daemon: Daemon) -> None:
    cursor = daemon.call("GET", "/v1/ended")["cursor"]
    job_id = daemon.submit("true", stdout="/dev/null")
    answer = daemon.call("GET", f"/v1/ended?after={cursor}&timeout_s=60")
    assert [job["id"] for job in answer["jobs"]] == [job_id]
    assert daemon.call("GET", f"/v1/ended?after={answer['cursor']}&timeout_s=0")["jobs"] == []
    for wrong in ("", "x", "1.2", f"{cursor}9", cursor.replace(".", ".-")):
        assert daemon.call("GET", f"/v1/ended?after={wrong}")["missed"] is True
    wait_until(lambda: not daemon.call("GET", "/v1/jobs")["jobs"], what="the job to be gone")


# --- options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        ({"gpus": 2}, "gpus", 2),
        ({"gpus": 1.0}, "gpus", 1),
        ({"gpus": 0.5}, "gpu_fraction", 0.5),
        ({"gpus": "a100:2"}, "gpu_type", "a100"),
        ({"gpus": "a100:2"}, "gpus", 2),
        ({"gpus": "a100:0.5"}, "gpu_fraction", 0.5),
        ({"gpus": "t4"}, "gpus", 1),
        ({"vram": "8G"}, "vram_mib", 8192),
        ({"vram": 100}, "vram_mib", 100),
        ({"time": timedelta(minutes=2)}, "time_limit_s", 120),
        ({"time": 90}, "time_limit_s", 90),
        ({"time": "auto"}, "time_limit_s", "auto"),
        ({"time": "UNLIMITED"}, "time_limit_s", "unlimited"),
        ({"backoff": 0}, "backoff_s", 0),
        ({"begin": datetime(2030, 1, 1, tzinfo=timezone.utc)}, "begin_at", 1893456000.0),
        ({"output": Path("a")}, "stdout", "a"),
        ({"nodelist": ("a", "b")}, "nodelist", ["a", "b"]),
        ({"time_limit_s": 5}, "time_limit_s", 5),
    ],
)
def test_options_become_fields(options: dict[str, Any], field: str, value: object) -> None:
    assert spec_of(options)[field] == value


def test_every_option_is_a_field_of_the_daemon() -> None:
    texts = {
        "time": "1h",
        "backoff": "1s",
        "backoff_max": "1s",
        "grace": "1s",
        "lost_after": "30m",
        "vram": "1G",
        "min_vram": "1G",
        "mem": "1G",
        "mem_per_cpu": "1G",
        "mem_per_gpu": "1G",
        "log_max": "1G",
        "begin": "now+1h",
        "deadline": "now+1h",
        "variants": ["-g 1"],
    }
    for name in JobOptions.__annotations__:
        found = spec_of({name: texts.get(name, {} if name in ("env", "extra_env") else "1" if name == "gpus" else "x")})
        assert found.keys() <= SPEC_FIELDS.keys(), name


def test_names_match_those_of_the_daemon() -> None:
    given_by_arguments = {"argv", "script", "script_name", "script_path", "work_dir", "umask", "env_named"}
    of_commands = {"submit_line", "slurm", "only_holds"}
    of_grun = {"interactive", "keep", "lease_s"}
    assert OPTIONS - JobOptions.__annotations__.keys() == (
        SPEC_FIELDS.keys() - JobOptions.__annotations__.keys() - given_by_arguments - of_grun - of_commands
    )
    fields = {name for change in CHANGES for name in changes_of({change: None})}
    assert fields == set(UPDATE_FIELDS)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda client: client.submit("true", tiem="2h"),
            "submit() got an unexpected keyword argument 'tiem'; did you",
        ),
        (lambda client: client.submit("true", tiem="2h"), "did you mean time=?"),
        (lambda client: client.submit("true", time_limits=5), "did you mean time_limit_s=?"),
        (lambda client: client.submit("true", comand="x"), "did you mean command=?"),
        (lambda client: client.submit("true", work_dir="/tmp"), "did you mean chdir=?"),
        (lambda client: client.submit("true", partition="gpu"), "did you mean queue=?"),
        (lambda client: client.submit("true", colour="red"), "see JobOptions in docs/reference/python.md"),
        (lambda client: client.submit_all(["true"], mme="2G"), "submit_all() got an unexpected keyword argument 'mme'"),
        (lambda client: client.resubmit(1, tiem="2h"), "resubmit() got an unexpected keyword argument 'tiem'"),
        (
            lambda client: client.update(1, tiem="2h"),
            "update() got an unexpected keyword argument 'tiem'; did you mean",
        ),
        (lambda client: client.update(1, output="x"), "update() got an unexpected keyword argument 'output'"),
        (
            lambda client: gpusched.Executor(client, max_worker=2),
            "Executor() got an unexpected keyword argument 'max_wor",
        ),
    ],
)
def test_a_misspelt_keyword_is_refused_with_a_suggestion(
    client: gpusched.Client, daemon: Daemon, call: Callable[[gpusched.Client], object], says: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(says)):
        call(client)
    assert daemon.call("GET", "/v1/jobs?states=all")["jobs"] == []


def test_update_accepts_the_options_of_submit(client: gpusched.Client) -> None:
    job = client.submit("true", hold=True, cpus=0, output="/dev/null", begin="now+2hours")
    assert job.eligible_at - job.submit_at == pytest.approx(7200, abs=30)
    client.update(job, time="2h", mem="1G", begin="now+1hour", cpus=0.5)
    found = client.job(job)
    assert (found.time_limit_s, found.mem_mib, found.cpus) == (7200, 1024, 0.5)
    assert found.eligible_at - found.submit_at == pytest.approx(3600, abs=30)
    client.update(job, time=timedelta(minutes=5), begin=None, mem=None)
    found = client.job(job)
    assert (found.time_limit_s, found.mem_mib, found.eligible_at) == (300, 0, found.submit_at)
    client.update(job, time=None)
    assert client.job(job).time_limit_s is None
    for bad in ({"time": "soon"}, {"mem": "lots"}, {"begin": "someday"}):
        with pytest.raises(UsageError, match=next(iter(bad))):
            client.update(job, **bad)


def test_a_job_that_can_never_start_is_submitted_with_a_warning(client: gpusched.Client) -> None:
    failed = client.wait(client.submit("false", cpus=0, output="/dev/null"))
    for submit in (client.submit, lambda line, **options: client.submit_all([line], **options)):
        with pytest.warns(
            UserWarning, match=f"can never start: depends on the success of job {failed.id}, which ended"
        ):
            submit("true", cpus=0, output="/dev/null", dependency=f"afterok:{failed.id}")


def test_an_update_of_gpus_clears_an_earlier_share_and_vice_versa() -> None:
    assert changes_of({"gpus": 0.5}) == {"gpus": 1, "gpu_fraction": 0.5}
    assert changes_of({"gpus": "a100:2"}) == {"gpus": 2, "gpu_fraction": None, "gpu_type": "a100"}


def test_every_field_of_a_job_exists_in_the_daemon() -> None:
    assert JobInfo.__dataclass_fields__.keys() - {"existing"} <= JOB_FIELDS.keys()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda client: client.submit("true", snapshot="tar"), "snapshot='tar' must be True"),
        (lambda client: client.submit_all("echo a"), "iterable of lines, not one string"),
        (lambda client: client.submit("  "), "the command is empty"),
        (lambda client: client.submit("true", key_again="failed"), "needs a key"),
        (lambda client: client.submit("true", extra_env={"SEED": 1}), "the variable 'SEED' is 1; both must be strings"),
        (lambda client: client.submit("true", gpus="a100:x"), "it must be a number, as '2', or a type and a number"),
    ],
)
def test_ambiguous_mistakes_are_refused(
    client: gpusched.Client, daemon: Daemon, call: Callable[[gpusched.Client], object], says: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        call(client)
    assert daemon.call("GET", "/v1/jobs?states=all")["jobs"] == []


def test_the_last_job_can_be_waited_for_among_others(client: gpusched.Client) -> None:
    first = client.submit("true", cpus=0, output="/dev/null")
    last = client.submit("true", cpus=0, output="/dev/null")
    assert [job.id for job in client.wait([first, "@"], timeout_s=60)] == [first.id, last.id]


def test_a_snapshot_warns_of_code_outside_it(
    client: gpusched.Client, daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSCHED_HOME", str(daemon.home))
    code = tmp_path / "code"
    code.mkdir()
    (code / "m.py").write_text("")
    with pytest.warns(UserWarning, match=r"m\.py is used in place") as caught:
        job = client.submit(["cat", f"{code}/m.py"], snapshot="copy", chdir=code, hold=True)
    assert caught[0].filename == __file__
    assert job.work_dir.startswith(f"{daemon.home}/snapshots/")
