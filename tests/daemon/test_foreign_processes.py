"""Users whose processes use GPUs without a job: told on their terminals, adopted by whoever may, ended by policy."""

from __future__ import annotations

import json
import os
import pty
import pwd
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from foreign_processes import SLEEPS, STUBBORN, ForeignProcesses
from people import ANN, BOB, EVE, NEEDS_ROOT, SystemDaemon
from support import wait_until

from gpusched.errors import Forbidden, GpuschedError

pytestmark = NEEDS_ROOT

OWNER = "nobody"
"""Whose uid is a person's, and who has no terminal but that of the test."""
CONFIG = """
idle_poll_s = 0.2
[access]
admin_group = "games"
[foreign]
"""
QUICK = "message_after_s = 0\n"


@pytest.fixture
def make() -> Iterator[Callable[..., tuple[SystemDaemon, ForeignProcesses]]]:
    made: list[SystemDaemon] = []
    theirs: list[ForeignProcesses] = []

    def of(settings: str) -> tuple[SystemDaemon, ForeignProcesses]:
        daemon = SystemDaemon()
        daemon.settings.write_text("[node]\ncpus = 8\n[daemon]\npoll_s = 0.2" + CONFIG + settings)
        foreign_processes = ForeignProcesses(daemon.home)
        daemon.env["GPUSCHED_FAKE_GPUS"] = str(foreign_processes.path)
        made.append(daemon)
        theirs.append(foreign_processes)
        daemon.start()
        return daemon, foreign_processes

    yield of
    for foreign_processes in theirs:
        foreign_processes.close()
        for card in foreign_processes.cards:
            card["processes"] = []
        foreign_processes.write()
    for daemon in made:
        daemon.close()


@pytest.fixture
def terminal() -> Iterator[int]:
    """What the owner sees on a terminal that takes messages."""
    master, slave = pty.openpty()
    path = os.ttyname(slave)
    os.chown(path, pwd.getpwnam(OWNER).pw_uid, -1)
    os.chmod(path, 0o620)
    yield master
    os.close(slave)
    os.close(master)


def seen_on(master: int, pid: int) -> str:
    """What came about this process; other tests may tell the same user of theirs meanwhile."""
    text = b""
    while select.select([master], [], [], 0)[0]:
        text += os.read(master, 4096)
    found = text.decode().replace("\r", "")
    return found if f"process {pid} " in found else ""


def row(daemon: SystemDaemon, pid: int) -> dict[str, Any]:
    rows = daemon.call("GET", "/v1/foreign")["foreign"]
    return next((found for found in rows if found["pid"] == pid), {})


def crowd(
    daemon: SystemDaemon, foreign_processes: ForeignProcesses, code: str = SLEEPS, **facts: Any
) -> subprocess.Popen[bytes]:
    """A process of the owner's on the first card, and ann's job that waits for both."""
    process = foreign_processes.start(code, user=OWNER, stdout=subprocess.PIPE)
    if code == STUBBORN:
        assert process.stdout is not None
        process.stdout.readline()
    foreign_processes.put(0, process.pid, user=OWNER, **facts)
    wait_until(lambda: bool(row(daemon, process.pid)), what="the stranger to be seen")
    return process


def looks_again(daemon: SystemDaemon, turns: int = 20) -> None:
    """Wait until the daemon has turned so often: at each poll it looks at the foreign_processes."""

    def count() -> int:
        return int(daemon.call("GET", "/v1/status")["daemon"]["tick"]["count"])

    until = count() + turns
    wait_until(lambda: count() >= until, what="some looks at the stranger")


def can_others_run(*command: str) -> bool:
    try:
        return subprocess.run(command, user=OWNER, cwd="/", capture_output=True, check=False).returncode == 0
    except OSError:
        return False


SENDS = pytest.mark.skipif(
    os.geteuid() == 0 and not can_others_run(sys.executable, "-c", "import encodings"),
    reason=f"what sends to a user runs as that user, and {OWNER} cannot execute {sys.executable}",
)


@SENDS
def test_the_owner_is_notified_on_the_terminal_when_a_job_waits(make: Any, terminal: int) -> None:
    daemon, foreign_processes = make('message = ["write"]\n' + QUICK)
    process = crowd(daemon, foreign_processes)
    looks_again(daemon, 20)
    # Nobody waits for its card.
    assert seen_on(terminal, process.pid) == ""
    assert row(daemon, process.pid)["told_at"] is None
    daemon.person(ANN).submit("true", gpus=2)
    wait_until(lambda: row(daemon, process.pid)["told_by"] == ["write"], what="the owner to be told")
    text = seen_on(terminal, process.pid)
    assert f"your process {process.pid} (python) has been on GPU 0 (15G) for" in text
    assert "1 job waits for it." in text
    assert f"gpusched adopt {process.pid}" in text
    # And not again within the next hours.
    looks_again(daemon, 40)
    assert seen_on(terminal, process.pid) == ""
    shown = subprocess.run(
        [sys.executable, "-c", "from gpusched.cli.ginfo import main; main()", "--foreign"],
        env={**os.environ, "GPUSCHED_SOCKET": str(daemon.socket), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert shown.splitlines()[0].split()[-1] == "NOTIFIED"
    assert "ago by write" in shown


def test_a_small_process_gets_no_notice_and_delays_no_job(make: Any, terminal: int) -> None:
    daemon, foreign_processes = make('message = ["write"]\nonly_when_wanted = false\n' + QUICK)
    process = crowd(daemon, foreign_processes, vram="600MiB")
    job = daemon.person(ANN).submit("true", gpus=2)
    assert daemon.wait(job)[0]["state"] == "COMPLETED"
    assert row(daemon, process.pid)["told_at"] is None
    assert seen_on(terminal, process.pid) == ""


def test_both_owners_are_notified_of_a_process_on_a_booked_gpu(make: Any) -> None:
    daemon, foreign_processes = make('message = ["write"]\n' + QUICK)
    ann = daemon.person(ANN)
    job = ann.submit("sleep", "1000", gpus=1)
    wait_until(lambda: ann.call("GET", f"/v1/jobs/{job}")["job"]["gpus"], what="the job to start")
    card = ann.call("GET", f"/v1/jobs/{job}")["job"]["gpus"][0]["index"]
    process = foreign_processes.start(user=OWNER)
    foreign_processes.put(card, process.pid, user=OWNER)
    # Nobody waits; the job that runs there is enough.
    wait_until(lambda: row(daemon, process.pid).get("told_at") is not None, what="its owner to be told")

    def told() -> list[str]:
        events = ann.call("GET", f"/v1/jobs/{job}")["job"]["events"]
        return [event["text"] for event in events if event["kind"] == "intruder"]

    wait_until(lambda: len(told()) == 1, what="the job's owner to be told")
    assert told() == [
        f"foreign process {process.pid} on GPU {card} (python, of {OWNER}) holds 15G of what this job booked"
    ]
    (intruder,) = ann.call("GET", f"/v1/jobs/{job}")["job"]["intruders"]
    assert (intruder["pid"], intruder["user"], intruder["job"]) == (process.pid, OWNER, None)
    looks_again(daemon)
    assert len(told()) == 1
    assert process.poll() is None


@SENDS
def test_an_unreachable_owner_is_reported(make: Any) -> None:
    daemon, foreign_processes = make('message = ["notify"]\n' + QUICK)
    process = crowd(daemon, foreign_processes)
    daemon.person(ANN).submit("true", gpus=2)
    wait_until(lambda: row(daemon, process.pid)["untold"] is not None, what="the try to fail")
    (seen,) = daemon.person(BOB).call("GET", "/v1/foreign")["foreign"]
    assert (seen["told_at"] is not None, seen["told_by"], seen["untold"]) == (True, [], None)
    assert "notify.toml" in row(daemon, process.pid)["untold"]
    assert row(daemon, process.pid)["told_by"] == []


KILLS = 'message = ["write"]\nkill_after_s = 0.1\nkill_grace_s = 2\n' + QUICK + "[gpu]\nforeign_peak_s = 0\n"


@pytest.mark.parametrize("code", [SLEEPS, STUBBORN], ids=["ends at TERM", "needs KILL"])
def test_the_policy_can_end_it_for_waiting_jobs(make: Any, terminal: int, code: str) -> None:
    daemon, foreign_processes = make(KILLS)
    process = crowd(daemon, foreign_processes, code)
    job = daemon.person(ANN).submit("true", gpus=2)
    assert process.wait(45) == (-9 if code == STUBBORN else -15)
    foreign_processes.put(0)
    # What was there a moment ago counts as long as [gpu] foreign_peak_s says.
    assert daemon.wait(job)[0]["state"] == "COMPLETED"
    (path,) = daemon.home.rglob("audit.jsonl")
    deeds = [json.loads(line) for line in path.read_text().splitlines()]
    sent = [(deed["what"], deed["owner"]) for deed in deeds if deed["target"] == f"process {process.pid}"]
    assert (
        sent[: 1 + (code == STUBBORN)] == [("send TERM to", OWNER), ("send KILL to", OWNER)][: 1 + (code == STUBBORN)]
    )


def test_no_process_is_ended_by_default_or_without_need(make: Any, terminal: int) -> None:
    daemon, foreign_processes = make(KILLS.replace("[gpu]", 'exempt_queues = ["default"]\n[gpu]'))
    process = crowd(daemon, foreign_processes)
    daemon.person(ANN).submit("true", gpus=2)
    looks_again(daemon, 60)
    assert process.poll() is None
    assert seen_on(terminal, process.pid) == ""


# --- adopting, as foreign processes to each other -----------------------------------------------------------


def test_only_the_owner_or_an_admin_may_adopt(make: Any) -> None:
    daemon, foreign_processes = make("")
    process = crowd(daemon, foreign_processes)
    bob, eve = daemon.person(BOB), daemon.person(EVE)
    refused = bob.refusal("POST", "/v1/adopt", {"pid": process.pid})
    assert isinstance(refused, Forbidden)
    assert refused.message == f"process {process.pid} belongs to {OWNER}, not to {BOB}"
    # eve is in the admin group; the job is the owner's all the same.
    job = eve.call("POST", "/v1/adopt", {"pid": process.pid, "time_limit_s": 3600})["adopted"]["id"]
    assert daemon.wait_state(job, "RUNNING")["user"] == OWNER
    wait_until(lambda: daemon.job(job)["runs"][-1]["pid"] == process.pid, what="it to be watched")
    assert isinstance(bob.refusal("POST", "/v1/jobs/cancel", {"ids": [job]}), Forbidden)
    owner = daemon.person(OWNER)
    owner.call("POST", "/v1/jobs/cancel", {"ids": [job]})
    assert process.wait(60) == -15
    foreign_processes.put(0)
    assert daemon.wait(job)[0]["state"] == "CANCELLED"
    (path,) = daemon.home.rglob("audit.jsonl")
    deeds = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(deed["user"], deed["what"], deed["owner"]) for deed in deeds] == [(EVE, "adopt", OWNER)]


def test_a_site_may_restrict_adoption_to_admins(make: Any) -> None:
    daemon, foreign_processes = make('adopt = "admin"\n')
    process = crowd(daemon, foreign_processes)
    refused = daemon.person(OWNER).refusal("POST", "/v1/adopt", {"pid": process.pid})
    assert isinstance(refused, Forbidden)
    assert refused.message == f"only an admin may adopt processes here, not {OWNER}"
    job = daemon.person(EVE).call("POST", "/v1/adopt", {"pid": process.pid})["adopted"]["id"]
    assert daemon.wait_state(job, "RUNNING")["user"] == OWNER


def test_the_root_daemon_ends_no_process_that_its_user_could_not(make: Any) -> None:
    """What an adopted process has started as another user is no part of the job."""
    daemon, foreign_processes = make("")
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        "print(child.pid, flush=True)\n"
        f"os.setuid({pwd.getpwnam(OWNER).pw_uid})\n"
        "time.sleep(1000)\n"
    )
    process = foreign_processes.start(code, stdout=subprocess.PIPE)
    assert process.stdout is not None
    roots = int(process.stdout.readline())
    foreign_processes.put(0, process.pid, user=OWNER)
    wait_until(lambda: bool(row(daemon, process.pid)), what="the stranger to be seen")
    wait_until(lambda: real_uid(process.pid) == pwd.getpwnam(OWNER).pw_uid, what="it to be the owner's")
    owner = daemon.person(OWNER)
    job = owner.call("POST", "/v1/adopt", {"pid": process.pid})["adopted"]["id"]
    wait_until(lambda: daemon.job(job)["runs"][-1]["pid"] == process.pid, what="it to be watched")
    owner.call("POST", "/v1/jobs/cancel", {"ids": [job]})
    assert process.wait(60) == -15
    foreign_processes.put(0)
    daemon.wait(job)
    os.kill(roots, 9)


def real_uid(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split("Uid:")[1].split()[0])


def test_a_hidden_job_on_the_gpu_is_not_named(make: Any) -> None:
    daemon, foreign_processes = make("")
    text = daemon.settings.read_text().replace("[access]\n", '[access]\nprivate_data = ["jobs"]\n')
    daemon.settings.write_text(text)
    daemon.stop()
    daemon.start()
    job = daemon.person(ANN).submit("sleep", "1000", gpus=2)
    daemon.wait_state(job, "RUNNING")
    process = crowd(daemon, foreign_processes)
    with pytest.raises(GpuschedError) as caught:
        daemon.person(OWNER).call("POST", "/v1/adopt", {"pid": process.pid})
    assert caught.value.message == "GPU 0 is booked by another job"
