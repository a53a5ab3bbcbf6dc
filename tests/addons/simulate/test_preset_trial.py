"""The process that replays the last weeks: what it makes of them, and what it cannot do."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import Lab
from preset_builders import Processes, lab_with_history
from support import wait_until

from gpusched import paths
from gpusched.addons.simulate import auto_preset
from gpusched.addons.simulate.auto_preset import AutoPreset, night_after, start_trial
from gpusched.addons.simulate.history import trace_of
from gpusched.addons.simulate.preset_choice import PresetState, TrialResult
from gpusched.addons.simulate.preset_trial import judge, read_export
from gpusched.addons.simulate.trace import TraceJob
from gpusched.addons.simulate.trial_export import ReplayRequest, TrialLimits
from gpusched.model import value
from gpusched.model.job import ArraySpec, JobEvent
from gpusched.model.presets import CHOICES
from gpusched.model.queue_settings import AccountSettings
from gpusched.model.states import JobState, ReasonCode, RunState
from gpusched.model.value import replace
from gpusched.ports import Changes
from gpusched.testing import job, launch, run

LIMITS = TrialLimits(os.getpid(), 600, 1024)


def export_of(lab: Lab, folder: Path) -> Path:
    """What the daemon writes for the process."""
    processes = Processes()
    processes.says = f"cat > {folder}/export"
    auto = AutoPreset(lab.ticker, str(folder / "preset.json"), start=processes)
    auto.judge_now()
    while auto.pid is None and auto.is_judging:
        auto.poll()
    processes.started[0].wait(30)
    auto.close()
    return folder / "export"


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_of(lab_with_history(), tmp_path_factory.mktemp("export"))


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    found: list[subprocess.Popen[bytes]] = []
    yield found
    for child in found:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def test_every_preset_is_replayed_on_the_same_jobs(export: Path) -> None:
    found = judge(export.read_bytes().splitlines())
    assert found.jobs == 240
    assert found.makes_sense("fair")
    assert list(found.worth) == list(CHOICES)
    assert all(gain.parts == 12 for gain in found.gains.values())
    # Jobs of four users' hours on four GPUs have to wait now and then.
    assert any(one.wait_s > 0 for one in found.worth.values())
    assert all(one.wide_wait_s is not None and one.light_wait_s is not None for one in found.worth.values())


def test_an_export_contains_everything_a_replay_reads(tmp_path: Path) -> None:
    lab = lab_with_history()
    changes, at = Changes(), lab.clock.now() - 5000.0
    odd = {
        330: {},
        331: {"dependency": "afterok:330"},
        332: {"array": ArraySpec("0-3", throttle=2)},
        333: {"time_limit_s": 600, "qos": "", "nice": 5},
        334: {"deadline_at": at + 9000},
        335: {"begin_at": at + 50},
    }
    for number, parts in odd.items():
        made = job(number, submit_at=at, queued_at=at, user="dan", **parts)
        if number == 330:
            made = replace(made, spec=replace(made.spec, hold=True))
        if number == 332:
            made = replace(made, array_id=328, task=3)
        ends = (JobState.PREEMPTED, JobState.FAILED, JobState.COMPLETED)
        for attempt, end in enumerate(ends, start=1):
            start_at = at + 100 * attempt
            one = run(
                made,
                number=attempt,
                state=RunState.ENDED,
                intent_at=start_at,
                start_at=start_at,
                end_at=start_at + 90,
                outcome=end,
                reason=ReasonCode.NONE,
            )
            changes.runs[one.id] = one
        changes.jobs[number] = replace(made, state=JobState.COMPLETED, start_at=start_at, end_at=start_at + 90, run=3)
    changes.events = [JobEvent(330, at + 60, "released", "by eve"), JobEvent(330, at + 1, "held", "by eve")]
    never_ran = job(336, submit_at=at)
    changes.jobs[336] = replace(never_ran, state=JobState.CANCELLED, end_at=at + 1)
    lab.store.commit(changes)
    lab.ticker.reload()
    lab.ticker.tick()

    def told(one: TraceJob) -> TraceJob:
        """Without what is its user's own."""
        assert one.spec is not None
        spec = replace(one.spec, name="", launch=launch())
        return replace(one, name="", spec=spec)

    _, *lines = export_of(lab, tmp_path).read_bytes().splitlines()
    direct, exported = trace_of(lab.store), read_export(lines)
    assert [told(one) for one in exported.jobs] == [told(one) for one in direct.jobs]
    assert len(exported.jobs) == 246


def test_only_the_newest_jobs_are_replayed(export: Path) -> None:
    head, *rest = export.read_bytes().splitlines()
    assert judge([head.replace(b'"most_jobs":10000', b'"most_jobs":100'), *rest]).jobs == 100


def test_settings_stated_by_the_admin_apply_under_every_preset(tmp_path: Path) -> None:
    # Whoever states the order leaves presets little to differ in.
    lab = lab_with_history(order="fifo", backfill=False, predict=False)
    worth = judge(export_of(lab, tmp_path).read_bytes().splitlines()).worth
    assert len(set(worth.values())) == 1


@pytest.mark.parametrize(("hours", "period"), [(10_000, "month"), (60, "total")])
def test_budgets_neither_keep_the_clock_going_nor_fail_the_trial(export: Path, hours: float, period: str) -> None:
    head, *rest = export.read_bytes().splitlines()
    asked = value.decode(head, ReplayRequest)
    accounts = {
        name: AccountSettings(name, users={name: 1.0}, gpu_hours=hours, budget_period=period)
        for name in ("ann", "bob", "cyd")
    }
    head = value.encode(replace(asked, settings=replace(asked.settings, account=accounts)))
    found = judge([head, *rest])
    assert list(found.worth) == list(CHOICES)
    # Of those that all presets start before the budget is spent for good.
    assert found.jobs == 240 if hours == 10_000 else 0 < found.jobs < 240


def test_the_answer_of_the_process_is_used(tmp_path: Path) -> None:
    lab = lab_with_history()
    auto = AutoPreset(lab.ticker, str(tmp_path / "preset.json"))
    auto.poll()
    lab.clock.at = night_after(lab.clock.at)
    auto.poll()

    def is_over() -> bool:
        auto.poll()
        return not auto.is_judging

    wait_until(is_over, 60, what="the judgement")
    assert auto.state.problem is None
    assert auto.state.judgement is not None
    assert auto.state.judgement.jobs == 240
    assert auto.state.why != PresetState().why


# --- what it cannot do ----------------------------------------------------------------------------


def run_trial(export: Path, limits: TrialLimits = LIMITS) -> tuple[int, bytes]:
    fd = os.open(export, os.O_RDONLY)
    try:
        child = start_trial(fd, limits)
    finally:
        os.close(fd)
    out, _ = child.communicate(timeout=120)
    return child.returncode, out


def test_the_process_stays_within_its_cpu_limit(tmp_path: Path) -> None:
    code, out = run_trial(export_of(lab_with_history(jobs=1500), tmp_path), TrialLimits(os.getpid(), 1, 1024))
    assert (code, out) == (-signal.SIGKILL, b"")


def test_the_process_stays_within_its_memory_limit(tmp_path: Path) -> None:
    with open(tmp_path / "export", "wb") as file:
        # One line, and none of it on the disk.
        file.truncate(2 << 30)
    code, out = run_trial(tmp_path / "export", TrialLimits(os.getpid(), 600, 256))
    assert code == 0
    assert value.decode(out, TrialResult) == TrialResult(
        error="the memory that it may use was not enough", is_too_much=True
    )


@pytest.mark.parametrize(
    "text",
    [
        *("hello\n", "[" * 100_000),
        *(pytest.param(text, marks=pytest.mark.nightly) for text in ("", "{}\n", "\x00" * 5000)),
    ],
)
def test_an_invalid_export_is_answered_too(tmp_path: Path, text: str) -> None:
    (tmp_path / "export").write_text(text)
    code, out = run_trial(tmp_path / "export")
    assert code == 0
    found = value.decode(out, TrialResult)
    assert "the history cannot be read" in (found.error or "")
    assert "Traceback" not in (found.error or "")


def waiting_trial(started: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """One that waits for its export."""
    read_fd, write_fd = os.pipe()
    child = start_trial(read_fd, LIMITS)
    os.close(read_fd)
    os.set_inheritable(write_fd, False)
    started.append(child)
    # It is confined before it reads.
    wait_until(lambda: os.sched_getscheduler(child.pid) == os.SCHED_IDLE, 30, what="the process to be confined")
    return child


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux")
def test_the_process_runs_at_idle_priority_and_writes_nothing(started: list[subprocess.Popen[bytes]]) -> None:
    child = waiting_trial(started)
    wait_until(lambda: limit_of(child.pid, "Max open files") == "64", 30, what="its limits")
    assert os.getpriority(os.PRIO_PROCESS, child.pid) == 19
    assert limit_of(child.pid, "Max file size") == "0"
    assert limit_of(child.pid, "Max processes") == "0"
    assert limit_of(child.pid, "Max address space") == str(1024 << 20)
    assert limit_of(child.pid, "Max cpu time") == "600"
    status = Path(f"/proc/{child.pid}/status").read_text()
    assert "NoNewPrivs:\t1" in status
    assert Path(f"/proc/{child.pid}/oom_score_adj").read_text() == "1000\n"
    opened = [os.readlink(f"/proc/{child.pid}/fd/{name}") for name in os.listdir(f"/proc/{child.pid}/fd")]
    assert not [one for one in opened if one.startswith("/") and one != "/dev/null"]


def limit_of(pid: int, name: str) -> str:
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    return next(line for line in lines if line.startswith(name)).removeprefix(name).split()[0]


def test_the_process_dies_with_the_daemon(tmp_path: Path) -> None:
    code = (
        "import os, sys, time\n"
        "from gpusched.addons.simulate.auto_preset import start_trial\n"
        "from gpusched.addons.simulate.trial_export import TrialLimits\n"
        "read_fd, _ = os.pipe()\n"
        "child = start_trial(read_fd, TrialLimits(os.getpid(), 600, 1024))\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    try:
        pid = int(parent.stdout.readline())
        wait_until(lambda: os.sched_getscheduler(pid) == os.SCHED_IDLE, 30, what="the process to be confined")
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        wait_until(lambda: is_gone(pid), 30, what="its end")
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


def is_gone(pid: int) -> bool:
    """Also where nobody reaps what has lost its parent."""
    try:
        return ") Z" in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


def test_a_process_without_its_daemon_does_nothing(export: Path) -> None:
    code, out = run_trial(export, TrialLimits(1, 600, 1024))
    assert (code, out) == (1, b"")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another")
def test_the_process_of_the_system_daemon_runs_as_nobody(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "is_system", lambda: True)
    says = "import os; print(os.getresuid(), os.getresgid(), os.getgroups(), sorted(os.environ))"
    monkeypatch.setattr(auto_preset, "_BOOT", says)
    # That of the tests may lie in a folder of root's.
    monkeypatch.setattr(sys, "executable", shutil.which("python3", path=os.defpath) or sys.executable)
    monkeypatch.setenv("SECRET", "hunter2")
    code, out = run_trial(export)
    assert code == 0
    assert out.startswith(b"(65534, 65534, 65534) (65534, 65534, 65534) [] ")
    assert b"SECRET" not in out
