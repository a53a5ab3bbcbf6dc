"""Energy and time series of a real daemon, over kills."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import Daemon
from support import wait_until


class Cards:
    """A file of simulated cards whose counter the test moves."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.set(0)

    def set(self, energy_mj: int) -> None:
        card = {"name": "A100", "vram": "80GiB", "power_w": 300, "power_limit_w": 400, "utilisation": 0.5}
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"gpus": [{**card, "energy_mj": energy_mj}]}))
        new.replace(self.path)


@pytest.fixture
def site(tmp_path: Path, make_daemon: Callable[..., Daemon]) -> tuple[Daemon, Cards]:
    cards = Cards(tmp_path / "gpus.json")
    return make_daemon(fake_gpus=str(cards.path), config="[daemon]\npoll_s = 0.1\n"), cards


def card(daemon: Daemon) -> dict[str, Any]:
    (found,) = daemon.call("GET", "/v1/series?cards=all&from=-300&points=2000&holders=1")["series"]
    return dict(found)


def test_energy_of_a_run_is_that_of_the_counter_also_while_the_daemon_was_dead(site: tuple[Daemon, Cards]) -> None:
    daemon, cards = site
    job = daemon.submit("sleep", "1000", gpus=1)
    daemon.wait_state(job, "RUNNING")
    wait_until(lambda: any(card(daemon)["use"]), what="samples")
    wait_until(lambda: card(daemon)["holders"] != [], what="a sample of the run")
    # A clean stop keeps the counter's last reading; what follows happens without a daemon.
    daemon.stop()
    cards.set(100_000)
    daemon.start()
    wait_until(lambda: (card(daemon)["energy_j"] or [None])[-1] is not None or any(card(daemon)["energy_j"]), what="J")
    daemon.kill()
    cards.set(150_000)
    daemon.start()
    daemon.call("POST", "/v1/jobs/cancel", {"ids": [job]})
    (found,) = daemon.wait(job)
    (run,) = found["runs"]
    assert run["energy_j"] == pytest.approx(150.0)
    assert run["measured"]["energy_source"] == "counter"
    assert run["measured"]["cards"][0]["power_limit_w"] == 400.0


def test_a_deleted_file_costs_no_job(site: tuple[Daemon, Cards]) -> None:
    daemon, _ = site
    job = daemon.submit("sleep", "1000", gpus=1)
    daemon.wait_state(job, "RUNNING")
    daemon.kill()
    for file in daemon.home.glob("series.db*"):
        file.write_bytes(b"no database" * 1000)
    daemon.start()
    assert daemon.state(job) == "RUNNING"
    assert "the time series begin again" in (daemon.home / "log" / "gpuschedd.log").read_text()
    wait_until(lambda: any(card(daemon)["use"]), what="samples")
