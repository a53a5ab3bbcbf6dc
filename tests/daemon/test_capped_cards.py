"""Power caps under a real daemon, which is killed while a run holds a capped card."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from harness import Daemon
from support import wait_until

CARD = {"name": "A100", "vram": "80GiB", "power_limit_w": 400}
CONFIG = "[daemon]\npoll_s = 0.1\n[queue.default]\n[queue.eco]\npower_cap_w = 300\n"


def test_a_cap_is_recorded_shown_kept_over_a_kill_and_taken_back(
    tmp_path: Path, make_daemon: Callable[..., Daemon]
) -> None:
    cards = tmp_path / "gpus.json"
    cards.write_text(json.dumps({"gpus": [{**CARD, "power_min_w": 100}, CARD]}))
    daemon = make_daemon(fake_gpus=str(cards), config=CONFIG)
    record = daemon.home / "power-limits.json"
    capped = daemon.submit("sleep", "1000", gpus=1, queue="eco")
    daemon.wait_state(capped, "RUNNING")
    refused = daemon.submit("sleep", "1000", gpus=1, queue="eco")
    wait_until(lambda: all(daemon.job(job)["runs"][0]["pid"] for job in (capped, refused)), what="both processes")
    assert daemon.job(capped)["runs"][0]["power_cap_w"] == 300
    assert daemon.job(refused)["runs"][0]["power_cap_w"] is None
    story = [event["text"] for event in daemon.job(refused)["events"]]
    assert "runs without the queue's power cap of 300 W: GPU 1: it has no power limit that can be set" in story
    doctor = daemon.call("GET", "/v1/doctor")["checks"]
    assert any("power cap of GPU 1: it has no power limit that can be set" in one["text"] for one in doctor)
    assert [(one["before_w"], one["cap_w"]) for one in json.loads(record.read_text()).values()] == [(400, 300)]
    daemon.kill()
    daemon.start()
    assert daemon.job(capped)["runs"][0]["power_cap_w"] == 300
    assert [(one["before_w"], one["cap_w"]) for one in json.loads(record.read_text()).values()] == [(400, 300)]
    daemon.call("POST", "/v1/jobs/cancel", {"ids": [capped, refused]})
    daemon.wait(capped)
    wait_until(lambda: json.loads(record.read_text()) == {}, what="the limit from before")
