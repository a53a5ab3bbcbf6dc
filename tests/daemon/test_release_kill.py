"""kill -9, or an error, at each step of the ticks that end a run and wait for its GPU to be given back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Daemon

from gpusched.daemon.failures import STEPS


def card(path: Path, **shown: str) -> None:
    """What the one GPU shows; `vram_used` is memory that no process is seen to hold."""
    path.with_suffix(".new").write_text(json.dumps({"gpus": [{"name": "A100", "vram": "24GiB", **shown}]}))
    path.with_suffix(".new").rename(path)


@pytest.mark.parametrize("how", ["", ":raise"])
@pytest.mark.parametrize("step", STEPS[STEPS.index("commit") :])
def test_no_job_gets_a_gpu_before_the_previous_one_released_it(
    make_daemon: Callable[..., Daemon], tmp_path: Path, step: str, how: str
) -> None:
    path = tmp_path / "gpus.json"
    card(path)
    daemon = make_daemon(fake_gpus=str(path), start=False)
    daemon.start()
    flag = tmp_path / "end"
    first = daemon.submit("sh", "-c", f"while ! test -e {flag}; do sleep 0.02; done", gpus=1)
    second = daemon.submit("true", gpus=1)
    daemon.wait_state(first, "RUNNING")
    daemon.kill()
    card(path, vram_used="8GiB")
    flag.touch()
    # The first commit of this daemon is that of the end.
    line = daemon.try_start(GPUSCHED_CRASH_AT=f"{step}{how}" if step == "commit" else f"commit,{step}{how}")
    if not how:
        daemon.reap()
        daemon.start()
    else:
        assert line == "ready"
    daemon.wait_state(first, "COMPLETING")
    assert daemon.state(second) == "PENDING"
    card(path)
    ended = daemon.wait(first, second)
    assert [job["state"] for job in ended] == ["COMPLETED", "COMPLETED"]
    assert ended[1]["runs"][0]["start_at"] >= ended[0]["runs"][0]["end_at"]
