"""A folder for each job: the same for all its runs, made as its user, gone when it is of no more use."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Daemon
from support import wait_until

GO_ON = (
    'echo "$GPUSCHED_RESTART_COUNT" >> "$GPUSCHED_CHECKPOINT_DIR/steps"; '
    'test "$(wc -l < "$GPUSCHED_CHECKPOINT_DIR/steps")" = 3 && cp "$GPUSCHED_CHECKPOINT_DIR/steps" steps'
)


def folder_of(daemon: Daemon, job_id: str) -> Path:
    return daemon.home / "checkpoints" / job_id


def test_later_runs_reuse_the_folder_and_success_removes_it(daemon: Daemon) -> None:
    job_id = daemon.submit("/bin/sh", "-c", GO_ON, retries=5, backoff_s=0)
    (job,) = daemon.wait(job_id)
    assert (job["state"], job["run"]) == ("COMPLETED", 3)
    assert (daemon.home / "steps").read_text().split() == ["0", "1", "2"]
    wait_until(lambda: not folder_of(daemon, job_id).exists(), what="the folder to go")


def test_jobs_one_after_the_other_find_their_folders_empty(daemon: Daemon) -> None:
    """What is left of a job's folder may become that of the next one, unless something is in it."""
    script = (
        'ls -A "$GPUSCHED_CHECKPOINT_DIR" >> seen; echo "$GPUSCHED_CHECKPOINT_DIR" >> dirs; '
        'test $(($1 % 3)) = 0 || echo $1 > "$GPUSCHED_CHECKPOINT_DIR/x"'
    )
    before: dict[str, str] = {}
    ids = []
    for number in range(9):
        ids.append(daemon.submit("/bin/sh", "-c", script, "sh", str(number), **before))
        before = {"dependency": f"afterany:{ids[-1]}"}
    daemon.wait(*ids)
    assert (daemon.home / "seen").read_text() == ""
    assert (daemon.home / "dirs").read_text().split() == [str(folder_of(daemon, job_id)) for job_id in ids]
    wait_until(lambda: not any(folder_of(daemon, job_id).exists() for job_id in ids), what="the folders to go")


def test_a_failed_job_keeps_the_folder_for_the_configured_time(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(fake_gpus="1x24GiB")
    job_id = daemon.submit("/bin/sh", "-c", 'echo x > "$GPUSCHED_CHECKPOINT_DIR/x"; exit 1', gpus=1)
    stranger = daemon.home / "checkpoints" / "4711"
    stranger.mkdir(parents=True)
    daemon.wait(job_id)
    daemon.stop()
    daemon.start()
    folder = folder_of(daemon, job_id)
    assert (folder / "x").exists()
    assert folder.stat().st_mode & 0o777 == 0o700
    daemon.stop()
    (daemon.home / "config.toml").write_text("[life]\ncheckpoint_keep_s = 0\n")
    daemon.start()
    wait_until(lambda: not folder.exists(), what="the folder to go")
    assert stranger.exists()


def test_a_kill_before_removal_only_delays_it(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = make_daemon(start=False)
    daemon.start()
    gate = tmp_path / "gate"
    script = f"echo x > $GPUSCHED_CHECKPOINT_DIR/x; while [ ! -e {gate} ]; do sleep 0.01; done"
    job_id = daemon.submit("/bin/sh", "-c", script, retries=1)
    daemon.wait_state(job_id, "RUNNING")
    wait_until((folder_of(daemon, job_id) / "x").exists, what="the job to write")
    daemon.kill()
    daemon.try_start(GPUSCHED_CRASH_AT="reply:2")
    gate.touch()
    wait_until(lambda: daemon.process is not None and daemon.process.poll() is not None, what="the crash")
    daemon.reap()
    daemon.start()
    assert daemon.wait(job_id)[0]["state"] == "COMPLETED"
    wait_until(lambda: not folder_of(daemon, job_id).exists(), what="the folder to go")


def test_a_job_without_gpus_or_retries_has_a_folder_too(daemon: Daemon) -> None:
    job_id = daemon.submit("/bin/sh", "-c", 'stat -c "%u %a" "$GPUSCHED_CHECKPOINT_DIR"')
    assert daemon.wait(job_id)[0]["state"] == "COMPLETED"
    assert daemon.output(job_id) == f"{os.geteuid()} 700\n"
    wait_until(lambda: not folder_of(daemon, job_id).exists(), what="the folder to go")


def test_an_empty_folder_is_removed_after_a_failure_too(daemon: Daemon) -> None:
    job_id = daemon.submit("/bin/sh", "-c", 'test -d "$GPUSCHED_CHECKPOINT_DIR" && exit 7')
    assert daemon.wait(job_id)[0]["exit_code"] == 7
    wait_until(lambda: not folder_of(daemon, job_id).exists(), what="the folder to go")


def test_without_a_folder_the_job_runs_and_its_log_says_why(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(config='[life]\ncheckpoint_dir = "/proc/none"\n')
    job_id = daemon.submit("/bin/sh", "-c", 'echo "<$GPUSCHED_CHECKPOINT_DIR>"', retries=1)
    assert daemon.wait(job_id)[0]["state"] == "COMPLETED"
    why, said = daemon.output(job_id).splitlines()
    assert why.startswith(f"gpusched: job {job_id} has no checkpoint folder: cannot make /proc/none/{job_id}: ")
    assert said == "<>"


def test_a_replaceable_folder_is_not_used(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    base = tmp_path / "shared"
    base.mkdir()
    base.chmod(0o777)
    daemon = make_daemon(config=f'[life]\ncheckpoint_dir = "{base}"\n')
    job_id = daemon.submit("/bin/sh", "-c", 'echo "<$GPUSCHED_CHECKPOINT_DIR>"')
    daemon.wait(job_id)
    why, said = daemon.output(job_id).splitlines()
    assert why == f"gpusched: job {job_id} has no checkpoint folder: others can write {base} (mode 777)"
    assert (said, list(base.iterdir())) == ("<>", [])


def test_a_symlink_instead_of_the_folder_is_not_followed(daemon: Daemon, tmp_path: Path) -> None:
    (daemon.home / "checkpoints" / "1").symlink_to(tmp_path)
    job_id = daemon.submit("/bin/sh", "-c", 'echo "<$GPUSCHED_CHECKPOINT_DIR>"')
    daemon.wait(job_id)
    assert daemon.output(job_id).splitlines()[-1] == "<>"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders to others and start jobs as them")
def test_a_foreign_folder_is_not_used(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    base = tmp_path / "shared"
    base.mkdir()
    daemon = make_daemon(config=f'[life]\ncheckpoint_dir = "{base}"\n')
    (base / "1").mkdir()
    os.chown(base / "1", 65534, -1)
    job_id = daemon.submit("/bin/sh", "-c", 'echo "<$GPUSCHED_CHECKPOINT_DIR>"', retries=1)
    assert daemon.wait(job_id)[0]["state"] == "COMPLETED"
    why, said = daemon.output(job_id).splitlines()
    assert why == f"gpusched: job {job_id} has no checkpoint folder: {base}/1 belongs to uid 65534"
    assert said == "<>"
    assert (base / "1").exists()
