"""Requests that no client makes, by the thousand: none is answered by a fault, and others are served meanwhile."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest
from attacks import as_user, daemon_pid, resident_mib, wait_for
from fuzz import Fuzzer, Tally
from people import ANN, BOB, NEEDS_ROOT

pytestmark = NEEDS_ROOT

GROWTH_MIB = 150
"""Of the daemon's memory, at most: some thousand jobs with their texts, answers on their way, caches that are full."""
CONFIG = "[limit]\nrequests_per_s = 1e6\nrequests_burst = 1000000\njobs_per_user = 500\n"


def fuzzed(make: Any, requests: int, seed: int) -> None:
    daemon = make(CONFIG)
    ann = daemon.person(ANN)
    before = resident_mib(daemon_pid(daemon))
    found: list[Tally] = []
    attacker = threading.Thread(
        target=lambda: found.append(as_user(BOB, Fuzzer(str(daemon.socket), seed).run_of(requests)))
    )
    attacker.start()
    slowest_s = 0.0
    served = 0
    while attacker.is_alive():
        began = time.monotonic()
        job = ann.submit("/bin/true")
        assert ann.call("GET", f"/v1/jobs?ids={job}")["jobs"]
        slowest_s = max(slowest_s, time.monotonic() - began)
        served += 1
        attacker.join(0.5)
    assert found, "the attacker did not come to an end"
    tally = found[0]
    assert tally.faults == [], tally.faults[:3]
    assert tally.asked == requests
    assert tally.statuses[200] > requests / 20
    assert tally.statuses[400] > requests / 20
    assert served > 1
    assert slowest_s < 60
    assert resident_mib(daemon_pid(daemon)) - before < GROWTH_MIB
    assert wait_for(ann, ann.submit("/bin/true"), "COMPLETED")
    log = (daemon.state_dir / "log" / "gpuschedd.log").read_text()
    assert "Traceback" not in log, log[-3000:]
    assert " ERROR " not in log, log[-3000:]
    assert (daemon.state_dir / "spool" / "engine.log").read_bytes() == b""


def test_malformed_requests_are_answered(make: Any) -> None:
    fuzzed(make, 3000, seed=int(os.environ.get("GPUSCHED_FUZZ_SEED", "1")))


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_a_hundred_thousand_malformed_requests_are_answered(make: Any) -> None:
    fuzzed(make, 100_000, seed=int(os.environ.get("GPUSCHED_FUZZ_SEED", str(time.time_ns() % 10**6))))
