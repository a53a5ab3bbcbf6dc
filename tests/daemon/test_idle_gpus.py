"""Idle GPUs with real processes: who is told, who is ended, and who is spared because it does something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from harness import Daemon
from support import wait_until

CONFIG = """
[idle]
after_s = 1
window_s = 0.3
lower_after_s = 1.5
then = "requeue"
then_after_s = 2
notice_s = 3
[daemon]
poll_s = 0.1
"""


def write_gpus(path: Path, loads: list[float | None]) -> None:
    cards = [{"vram": "24GiB", "utilisation": load, "memory_utilisation": load} for load in loads]
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"gpus": cards}))
    part.rename(path)


def idle_lines(daemon: Daemon, job_id: str) -> list[str]:
    return [event["text"] for event in daemon.job(job_id)["events"] if event["kind"] == "idle"]


def test_only_fully_idle_runs_are_ended(make_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    gpus = tmp_path / "gpus.json"
    write_gpus(gpus, [0, 0, 0, 0, 0, None])
    daemon = make_daemon(fake_gpus=str(gpus), config=CONFIG)
    sleeper = daemon.submit("/bin/sh", "-c", "trap 'echo told; exit 3' TERM; while :; do sleep 0.05; done", gpus=1)
    writer = daemon.submit("/bin/sh", "-c", "while :; do echo x; sleep 0.1; done", gpus=1)
    counter = daemon.submit("/bin/sh", "-c", "while :; do :; done", gpus=1)
    saver = daemon.submit("/bin/sh", "-c", 'while :; do touch "$GPUSCHED_CHECKPOINT_FILE"; sleep 0.1; done', gpus=1)
    exempt = daemon.submit("/bin/sleep", "1000", gpus=1, ignore_idle=True)
    unknown = daemon.submit("/bin/sleep", "1000", gpus=1)
    spared = [writer, counter, saver, exempt, unknown]
    for job_id in (sleeper, *spared):
        daemon.wait_state(job_id, "RUNNING")
    assert daemon.job(unknown)["gpus"][0]["index"] == 5
    wait_until(lambda: len(idle_lines(daemon, sleeper)) == 3, what="the sleeper to be due")
    nobody = "no job waits that could use them, so it continues, and is requeued once one does"
    assert idle_lines(daemon, sleeper)[-1] == f"its GPUs are still idle; {nobody}"
    why = daemon.call("GET", f"/v1/jobs/{sleeper}/why")["why"]["text"]
    assert why.startswith("runs; its GPUs have been idle for ")
    assert why.endswith("; it will be requeued once a job waits that could use them")
    assert (daemon.state(sleeper), daemon.job(sleeper)["run"]) == ("RUNNING", 1)
    (waiting,) = daemon.wait(daemon.submit("true", gpus=1))
    wait_until(lambda: daemon.job(sleeper)["runs"][1:], what="the sleeper to be run again")
    wait_until(lambda: daemon.job(sleeper)["runs"][1]["start_at"], what="its second run to start")
    assert waiting["end_at"] <= daemon.job(sleeper)["runs"][1]["start_at"]
    first = daemon.job(sleeper)["runs"][0]
    assert (first["outcome"], first["reason"]) == ("PREEMPTED", "GpuIdle")
    assert Path(first["stdout_path"]).read_text().endswith("told\n")
    assert daemon.job(sleeper)["nice"] >= 500
    for job_id in spared:
        assert (daemon.state(job_id), daemon.job(job_id)["run"]) == ("RUNNING", 1)
    wait_until(lambda: all(len(idle_lines(daemon, one)) == 2 for one in spared[:3]), what="the others to be told")
    assert idle_lines(daemon, exempt) == idle_lines(daemon, unknown) == []
    assert daemon.job(writer)["idle_at"] is not None
    write_gpus(gpus, [0.9] * 6)
    wait_until(lambda: daemon.job(writer)["idle_at"] is None, what="the mark to go")


def test_a_kill_after_the_decision_does_not_undo_it(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(start=False, fake_gpus="1x24GiB", config=CONFIG.replace("requeue", "cancel"))
    daemon.start()
    job_id = daemon.submit("/bin/sh", "-c", "trap '' TERM; while :; do sleep 0.05; done", gpus=1, grace_s=3)
    daemon.wait_state(job_id, "COMPLETING")
    daemon.kill()
    daemon.start()
    (job,) = daemon.wait(job_id)
    assert (job["state"], job["reason"]) == ("CANCELLED", "GpuIdle")
    assert len(idle_lines(daemon, job_id)) == 2
