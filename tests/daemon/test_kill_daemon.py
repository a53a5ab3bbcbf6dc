"""kill -9 of the daemon, at each named step of a tick and at random times under load.

After each: every acknowledged job is accounted for, ran exactly as often as its story says, with the
right exit code, and no GPU was given to two jobs at once. Each job appends a line when it begins and
one when it ends to a file of its own, so the processes themselves bear witness, not the daemon.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import Daemon
from support import wait_until

from gpusched.daemon.failures import STEPS
from gpusched.errors import GpuschedError
from gpusched.ports.tables import USAGE
from gpusched.store.sqlite import SqliteStore

# Writes "begin RUN GPUS TIME" and "end RUN TIME" with O_APPEND, one short line each: atomic on any
# local file system. $EPOCHREALTIME is bash's clock.
WITNESS = (
    'echo "begin $GPUSCHED_RUN ${CUDA_VISIBLE_DEVICES:--} $EPOCHREALTIME" >> "$WITNESS"; sleep $1; '
    'echo "end $GPUSCHED_RUN $EPOCHREALTIME" >> "$WITNESS"; exit $2'
)


def submit_witness(daemon: Daemon, sleep_s: float, code: int, **spec: Any) -> str:
    argv = ["/bin/bash", "-c", WITNESS, "witness", str(sleep_s), str(code)]
    spec.setdefault("stdout", "/dev/null")
    env = {"WITNESS": str(daemon.home / "witness")}
    return daemon.submit(*argv, env=env, **spec)


def check_witness(daemon: Daemon, jobs: dict[str, int], exact: bool = True) -> None:
    """Compare what the processes wrote with what the daemon says of these jobs (id -> exit code)."""
    ended = daemon.wait(*jobs)
    path = daemon.home / "witness"
    begins: dict[str, list[str]] = {}
    spans: dict[str, list[tuple[float, float]]] = {}
    open_at: dict[str, tuple[str, float]] = {}
    for line in path.read_text().splitlines():
        word, run, *rest = line.split()
        if word == "begin":
            assert run not in begins, f"run {run} was started twice"
            begins[run] = rest
            open_at[run] = (rest[0], float(rest[1]))
        else:
            gpus, began = open_at.pop(run)
            for gpu in [] if gpus == "-" else gpus.split(","):
                spans.setdefault(gpu, []).append((began, float(rest[0])))
    for job in ended:
        code = jobs[job["id"]]
        assert (job["state"], job["exit_code"]) == ("COMPLETED" if code == 0 else "FAILED", code), job
        started = [run for run in job["runs"] if run["start_at"] is not None]
        witnessed = [run for run in begins if run.split(".")[0] == job["id"]]
        assert len(witnessed) == len(started), (job["runs"], witnessed)
        assert len(started) == 1 or not exact, job["runs"]
        assert len({run["run"] for run in job["runs"]}) == len(job["runs"])
    for gpu, used in spans.items():
        used.sort()
        for (_, end), (begin, _) in itertools.pairwise(used):
            assert begin >= end, f"GPU {gpu} was given to two jobs at once"


def check_usage(daemon: Daemon) -> None:
    """What is recorded as used is what the runs took: no crash has lost a run or charged it twice."""
    took = 0.0
    for job in daemon.call("GET", "/v1/history?states=all")["jobs"]:
        for run in job["runs"]:
            if run["start_at"] is not None:
                took += len(run["gpus"]) * (run["end_at"] - run["start_at"])
    database = daemon.call("GET", "/v1/status")["daemon"]["database"]
    daemon.stop()
    store = SqliteStore.open(database)
    try:
        used = sum(usage.used.gpus for usage in store.load(USAGE).values())
    finally:
        store.close()
    # With a half-life of a week nothing fades within the test.
    assert used == pytest.approx(took, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_kill_before_each_tick_step_is_survived(make_daemon: Callable[..., Daemon], step: str, nth: int) -> None:
    daemon = make_daemon(start=False, fake_gpus="2x24GiB")
    daemon.try_start(GPUSCHED_CRASH_AT=f"{step}:{nth}")
    accepted: dict[str, int] = {}
    try:
        for number in range(6):
            # Every other one may start with two GPUs or with one, and never has both.
            either = {"gpus": 2, "variants": [{"gpus": 1}]} if number % 2 else {"gpus": 0}
            job_id = submit_witness(daemon, 0.01, number % 3, **either)
            accepted[job_id] = number % 3
    except (GpuschedError, OSError):
        pass  # the daemon died under this submission, which therefore was never acknowledged
    wait_until(lambda: daemon.process is not None and daemon.process.poll() is not None, what="the crash")
    daemon.reap()
    daemon.start()
    # Whatever was recorded without being acknowledged must run as well.
    known = {job["id"]: int(job["command"].split()[-1]) for job in daemon.call("GET", "/v1/jobs?states=all")["jobs"]}
    assert set(accepted) <= set(known)
    if known:
        check_witness(daemon, known)
        for job in map(daemon.job, known):
            # What the last run has booked is the request that the job was started with.
            assert len(job["runs"][-1]["gpus"]) == job["gpus_per_node"]
        check_usage(daemon)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("nth", [1, *(pytest.param(nth, marks=pytest.mark.nightly) for nth in (2, 3))])
def test_an_error_at_any_step_loses_no_job_and_sends_no_false_alert(
    make_daemon: Callable[..., Daemon], step: str, nth: int
) -> None:
    daemon = make_daemon(start=False, fake_gpus="2x24GiB")
    daemon.start(GPUSCHED_CRASH_AT=f"{step}:{nth}:raise")
    accepted: dict[str, int] = {}
    refused = 0
    for number in range(6):
        try:
            accepted[submit_witness(daemon, 0.01, number % 3, gpus=number % 2)] = number % 3
        except GpuschedError:
            refused += 1
    # Who was refused has no job, who was not has one, and all of them run.
    known = {job["id"] for job in daemon.call("GET", "/v1/jobs?states=all")["jobs"]}
    assert known == set(accepted)
    assert refused <= (STEPS.index(step) <= STEPS.index("commit"))
    check_witness(daemon, accepted)
    assert daemon.process is not None
    assert daemon.process.poll() is None
    long = daemon.submit("/bin/sleep", "1000")
    daemon.wait_state(long, "RUNNING")
    daemon.call("POST", "/v1/jobs/cancel", {"ids": [long]})
    assert daemon.wait(long)[0]["state"] == "CANCELLED"
    check_usage(daemon)


def test_a_cancel_is_carried_out_despite_an_error_after_the_commit(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(start=False)
    # The first goes by as the job starts.
    daemon.start(GPUSCHED_CRASH_AT=",".join(["reconcile:raise"] * 50))
    job_id = daemon.submit("/bin/sleep", "1000")
    daemon.wait_state(job_id, "RUNNING")
    assert daemon.call("POST", "/v1/jobs/cancel", {"ids": [job_id]})["cancelled"] == [job_id]
    assert daemon.wait(job_id)[0]["state"] == "CANCELLED"


def run_under_kills(daemon: Daemon, kills: int, seed: int) -> None:
    """Submit jobs while the daemon is killed at random times; check everything at the end."""
    dice = random.Random(seed)
    accepted: dict[str, int] = {}
    for _ in range(kills):
        for _ in range(dice.randint(1, 6)):
            code = dice.choice([0, 0, 0, 7])
            try:
                job_id = submit_witness(daemon, dice.choice([0, 0.01, 0.05, 0.2]), code, gpus=dice.randint(0, 2))
            except (GpuschedError, OSError):
                break
            accepted[job_id] = code
        wait_s = dice.random() * 0.15
        if dice.random() < 0.5:
            # Let time pass by waiting for something real: some job to end, or the time to be over.
            daemon.call("GET", f"/v1/wait?ids={next(reversed(accepted), '1')}&timeout_s={wait_s}")
        daemon.kill()
        daemon.start()
    check_witness(daemon, accepted)
    # Jobs that were recorded and not acknowledged too.
    wait_until(lambda: not daemon.call("GET", "/v1/jobs")["jobs"], timeout_s=60, what="all jobs to end")
    check_usage(daemon)


def test_kills_at_random_times_under_load_are_survived(make_daemon: Callable[..., Daemon]) -> None:
    run_under_kills(make_daemon(fake_gpus="3x24GiB"), kills=12, seed=int(os.environ.get("KILL_SEED", "1")))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(10))
def test_many_kills_at_random_times_are_survived(make_daemon: Callable[..., Daemon], seed: int) -> None:
    run_under_kills(make_daemon(fake_gpus="3x24GiB"), kills=25, seed=seed)


def test_a_recorded_cancel_is_carried_out_after_the_crash(
    make_daemon: Callable[..., Daemon],
) -> None:
    # Polls are ticks, too.
    daemon = make_daemon(start=False, config="[daemon]\npoll_s = 600\n")
    daemon.start(GPUSCHED_CRASH_AT="reconcile:4")
    job_id = daemon.submit("/bin/sleep", "1000")
    daemon.wait_state(job_id, "RUNNING")
    with pytest.raises((GpuschedError, OSError)):
        # One of these ticks reaches the step and dies there; the cancel itself may or may not be
        # answered, so it is asked until the daemon is gone.
        for _ in range(10):
            daemon.call("POST", "/v1/jobs/cancel", {"ids": [job_id]})
    daemon.reap()
    daemon.start()
    assert daemon.wait(job_id)[0]["state"] == "CANCELLED"


def test_runs_survive_the_daemon_and_keep_their_exit_codes(daemon: Daemon, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    ids = [
        daemon.submit("/bin/sh", "-c", f"while [ ! -e {gate} ]; do sleep 0.01; done; exit {code}") for code in (0, 3, 9)
    ]
    pids = [daemon.pid_of(job_id) for job_id in ids]
    daemon.kill()
    gate.touch()
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), what="the jobs to end")
    daemon.start()
    assert [job["exit_code"] for job in daemon.wait(*ids)] == [0, 3, 9]
    assert [job["run"] for job in daemon.wait(*ids)] == [1, 1, 1]


AT_ONCE = "[priority]\nreserve_after_s = 0\nreserve_after_runs = 0\n"


def test_the_delay_bound_of_a_job_survives_the_daemon(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(fake_gpus="1x24GiB", config=AT_ONCE)
    daemon.submit("sleep", "600", gpus=1)
    waiting = daemon.submit("true", gpus=1)

    def bound() -> float | None:
        facts = daemon.call("GET", f"/v1/jobs/{waiting}/why")["why"]["facts"]
        return facts.get("delay_ends_at")  # type: ignore[no-any-return]

    wait_until(lambda: bound() is not None, what="room is reserved for the job")
    before = bound()
    for _ in range(2):
        daemon.kill()
        daemon.start()
        wait_until(lambda: bound() is not None, what="room is reserved for it again")
        assert bound() == before
