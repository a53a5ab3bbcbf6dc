"""MIG instances with a real daemon: what a job sees of one, and what becomes of it when the instance is gone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Daemon
from support import wait_until

from gpusched.client import DaemonConnection
from gpusched.errors import Refused

CONFIG = "[daemon]\npoll_s = 0.1\n"
ECHO = 'echo "$CUDA_VISIBLE_DEVICES $GPUSCHED_GPUS"'


def test_a_job_gets_one_instance_and_sees_it_by_uuid(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(fake_gpus="2xA100:80GiB[mig=1x3g.40gb+2x1g.10gb]", config=CONFIG)
    gpus = {gpu["uuid"]: gpu for gpu in daemon.call("GET", "/v1/cluster")["gpus"]}
    assert [(gpu["index"], gpu["mig_profile"], gpu["state"]) for gpu in gpus.values()][:5] == [
        (0, None, "drained"),
        (1, None, "drained"),
        (1000, "3g.40gb", "idle"),
        (1001, "1g.10gb", "idle"),
        (1002, "1g.10gb", "idle"),
    ]
    any_one = daemon.submit("/bin/sh", "-c", ECHO, gpus=1)
    large = daemon.submit("/bin/sh", "-c", ECHO, gpus=1, gpu_type="3g.40gb")
    for job in daemon.wait(any_one, large):
        (share,) = job["gpus"]
        assert daemon.output(job["id"]) == f"{share['uuid']} 1\n"
        assert share["uuid"].startswith("MIG-")
    assert gpus[daemon.job(large)["gpus"][0]["uuid"]]["mig_profile"] == "3g.40gb"
    (event,) = [event for event in daemon.job(any_one)["events"] if event["kind"] == "started"]
    assert event["text"].endswith(", GPU 0:1")
    with pytest.raises(Refused, match="only MIG instances would do, and a job can use only one"):
        daemon.submit("/bin/true", gpus=2)


def test_all_instances_are_used_at_once_under_their_names(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(fake_gpus="1xA100:80GiB[mig=3x2g.20gb]", config=CONFIG)
    jobs = [daemon.submit("/bin/sleep", "1000", gpus=1) for _ in range(4)]
    for job_id in jobs[:3]:
        job = daemon.wait_state(job_id, "RUNNING")
        assert [gpu["enforcement"] for gpu in job["gpus"]] == ["MIG"]
    assert daemon.state(jobs[3]) == "PENDING"
    parent, *parts = daemon.call("GET", "/v1/cluster")["gpus"]
    assert (parent["state"], parent["why"], parent["mig_instances"]) == (
        "drained",
        "MIG is on: 3 instances are in its place",
        3,
    )
    assert [(gpu["state"], gpu["enforcement"], gpu["mig_parent"]) for gpu in parts] == [
        ("allocated", "MIG", parent["uuid"])
    ] * 3
    why = daemon.call("GET", f"/v1/jobs/{jobs[0]}/why")["why"]
    assert why["facts"] == {"vram_limit": {"GPU 0:0": "MIG"}}
    (gpus,) = [check for check in daemon.call("GET", "/v1/doctor")["checks"] if check["check"] == "gpus"]
    assert gpus["ok"], gpus
    drained = daemon.call("POST", "/v1/drain", {"targets": ["0:1"], "message": "slow"})
    assert list(drained["labels"].values()) == ["GPU 0:1"]
    (notice,) = daemon.call("GET", "/v1/jobs?notices=1")["notices"]
    assert notice["what"] == "GPU 0:1"
    with DaemonConnection(str(daemon.socket)) as client:
        assert f'gpusched_gpu_info{{node="{parent["node"]}",gpu="0:1"' in client.text("/v1/metrics")
    states = [gpu["state"] for gpu in daemon.call("GET", "/v1/cluster")["gpus"]]
    assert states == ["drained", "allocated", "draining", "allocated"]


def write(path: Path, *instances: dict[str, object]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"gpus": [{"name": "A100", "vram": "80GiB", "mig": list(instances)}]}))
    part.rename(path)


def test_a_job_whose_instance_was_removed_runs_again_on_another(
    make_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    gpus = tmp_path / "gpus.json"
    write(gpus, {"profile": "3g.40gb", "uuid": "MIG-old"})
    daemon = make_daemon(fake_gpus=str(gpus), config=CONFIG)
    job_id = daemon.submit("/bin/sh", "-c", "[ $CUDA_VISIBLE_DEVICES = MIG-new ] || sleep 1000", gpus=1)
    daemon.pid_of(job_id)
    write(gpus, {"profile": "1g.10gb", "uuid": "MIG-new"}, {"profile": "1g.10gb", "uuid": "MIG-newer"})
    (job,) = daemon.wait(job_id)
    first, second = job["runs"]
    assert (first["outcome"], first["reason"]) == ("NODE_FAIL", "GpuFailed")
    assert (job["state"], second["gpus"][0]["uuid"], job["failures"]) == ("COMPLETED", "MIG-new", 0)
    wait_until(
        lambda: [gpu["index"] for gpu in daemon.call("GET", "/v1/cluster")["gpus"]] == [0, 1000, 1001],
        what="the old instance to be forgotten",
    )


def test_a_gpu_is_divided_by_command_once_its_job_has_ended(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(fake_gpus="1xA100:80GiB", config=CONFIG)
    first = daemon.submit("/bin/sh", "-c", "while [ ! -e go ]; do sleep 0.1; done", gpus=1)
    daemon.wait_state(first, "RUNNING")
    plan = daemon.call("POST", "/v1/mig", {"target": "0", "layout": "3g.40gb, 2x2g.20gb"})["plan"]
    assert (plan["after"], [one["job"] for one in plan["waits_for"]]) == ("3g.40gb,2x2g.20gb", [first])
    part = daemon.submit("/bin/sh", "-c", ECHO, gpus=1, gpu_type="3g.40gb")
    (card,) = daemon.call("GET", "/v1/mig")["cards"]
    assert (card["layout"], card["wanted"], card["waits"]) == ("off", "3g.40gb,2x2g.20gb", f"waits for job {first}")
    why = daemon.call("GET", f"/v1/jobs/{part}/why")["why"]
    assert "drained: its MIG layout changes to 3g.40gb,2x2g.20gb" in why["text"]
    daemon.call("POST", "/v1/jobs/cancel", {"ids": [first]})
    (job,) = daemon.wait(part)
    assert job["state"] == "COMPLETED"
    assert daemon.output(part) == f"{job['gpus'][0]['uuid']} 1\n"
    (card,) = daemon.call("GET", "/v1/mig")["cards"]
    assert (card["layout"], card["wanted"], card["made"]) == ("3g.40gb,2x2g.20gb", None, "3g.40gb,2x2g.20gb")
    (entry,) = [one for one in daemon.call("GET", "/v1/settings-log")["entries"] if one.get("effects")]
    (effect,) = entry["effects"]
    assert (effect["before"], effect["after"]) == ("off", "3g.40gb,2x2g.20gb")
    with pytest.raises(
        Refused, match="asked for a MIG instance 7g.80gb; no GPU is divided so now, but GPU .*:0 could be"
    ):
        daemon.submit("/bin/true", gpus=1, gpu_type="7g.80gb")
