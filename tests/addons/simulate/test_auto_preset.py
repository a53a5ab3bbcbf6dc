"""`preset = "auto"` in the daemon: when it judges, what it makes of answers, and what a restart finds."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from lab import Lab
from preset_builders import DAY_S, Processes, lab_with_history, result
from support import wait_until

from gpusched import paths
from gpusched.addons.simulate import auto_preset
from gpusched.addons.simulate.auto_preset import HOUR, WALL_S, AutoPreset, night_after, read_state
from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.addons.simulate.preset_choice import MOST_JOBS, PresetState
from gpusched.daemon.preset import sentence
from gpusched.errors import NotReady, Refused
from gpusched.model import value
from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.presets import PRESETS, preset
from gpusched.model.value import replace
from gpusched.testing import request


class Night:
    """A scheduler whose nights come when they are called."""

    def __init__(self, folder: Path, lab: Lab) -> None:
        self.lab = lab
        self.path = str(folder / "preset.json")
        self.processes = Processes()
        self.chosen: list[str] = []
        self.monotonic = 0.0
        self.auto = self.restart()

    def restart(self) -> AutoPreset:
        """A daemon that finds what the last one has left."""
        self.auto = AutoPreset(
            self.lab.ticker,
            self.path,
            self.chosen.append,
            start=self.processes,
            monotonic=lambda: self.monotonic,
        )
        return self.auto

    def falls(self) -> None:
        """Go on to the next night, and let it be judged."""
        self.auto.poll()
        self.lab.clock.at = night_after(self.lab.clock.at)
        self.is_judged()

    def is_judged(self) -> None:
        """Poll until there is nothing more to do."""
        self.auto.poll()

        def is_over() -> bool:
            self.auto.poll()
            return not self.auto.is_judging

        wait_until(is_over, what="the judgement")

    def begins(self) -> int:
        """Go on to the next night, until the process is there; its pid."""
        self.auto.poll()
        self.lab.clock.at = night_after(self.lab.clock.at)
        while self.auto.pid is None:
            self.auto.poll()
        return self.auto.pid


@pytest.fixture
def night(tmp_path: Path) -> Any:
    made = Night(tmp_path, lab_with_history())
    yield made
    made.auto.close()
    for child in made.processes.started:
        child.kill()
        child.wait()


# --- when -----------------------------------------------------------------------------------------


def test_nights_begin_at_three_in_the_morning() -> None:
    at = time.mktime((2026, 11, 22, 2, 59, 0, 0, 0, -1))
    first = night_after(at)
    assert time.localtime(first)[:5] == (2026, 11, 22, HOUR, 0)
    assert time.localtime(night_after(first))[:5] == (2026, 11, 23, HOUR, 0)


@pytest.mark.parametrize("month", [3, 10])
def test_nights_with_a_clock_change_come_once(month: int) -> None:
    at = time.mktime((2026, month, 20, 12, 0, 0, 0, 0, -1))
    days = []
    for _ in range(15):
        at = night_after(at)
        days.append(time.localtime(at)[2:4])
    assert all(hour == HOUR for _, hour in days)
    assert len(set(days)) == 15


def test_presets_are_judged_once_each_night(night: Night) -> None:
    night.processes.answer(result())
    assert night.auto.poll() is False
    assert not night.processes.started
    for nights in (1, 2, 3):
        night.falls()
        night.lab.clock.advance(600)
        night.is_judged()
        assert len(night.processes.started) == nights


def test_a_restart_at_night_does_not_judge_again(night: Night) -> None:
    night.processes.answer(result())
    night.falls()
    night.restart()
    night.is_judged()
    assert len(night.processes.started) == 1


def test_a_daemon_down_at_night_judges_when_it_is_up(night: Night) -> None:
    night.processes.answer(result())
    night.auto.poll()
    for _ in range(3):
        # Each day it is started at noon and stopped in the evening.
        night.lab.clock.advance(DAY_S)
        night.restart()
        night.is_judged()
    assert len(night.processes.started) == 3


def test_manually_chosen_presets_are_not_judged(tmp_path: Path) -> None:
    night = Night(tmp_path, lab_with_history(preset="fifo"))
    night.falls()
    assert not night.processes.started
    assert night.auto.next_at() is None
    assert sentence(night.auto.document()) == "fifo"


def test_no_judgement_starts_while_commits_are_pending(night: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(night.lab.ticker), "is_quiet", property(lambda ticker: False))
    night.auto.poll()
    night.lab.clock.at = night_after(night.lab.clock.at)
    night.auto.poll()
    assert not night.auto.is_judging


# --- what is decided ------------------------------------------------------------------------------


def test_the_second_night_changes_over_and_keeps_stated_settings(tmp_path: Path) -> None:
    night = Night(tmp_path, lab_with_history(weight_age=7.0))
    night.processes.answer(result(throughput=0.2))
    night.falls()
    assert (night.auto.in_force, night.chosen) == ("fair", [])
    assert "changes over if it is so again" in sentence(night.auto.document())
    night.falls()
    assert (night.auto.in_force, night.chosen) == ("throughput", ["throughput"])
    assert night.lab.scheduler.settings.priority == preset("throughput", {"preset": "auto", "weight_age": 7.0})
    assert night.lab.scheduler.planner().state.settings.priority.order == PRESETS["throughput"]["order"]
    night.lab.ticker.tick()
    assert sentence(night.auto.document()) == (
        "auto: throughput; throughput is 20% better (better in 11 of 12 parts, p = 0.01), twice in a row"
    )


def test_a_restart_keeps_the_preset_and_the_verdict_of_the_night_before(night: Night) -> None:
    night.processes.answer(result(slurm=0.2))
    night.falls()
    night.restart()
    assert night.auto.state.candidate == "slurm"
    night.falls()
    assert read_state(night.path).in_force == "slurm"
    assert night.restart().in_force == "slurm"


def test_pending_jobs_follow_the_new_preset_at_once(tmp_path: Path) -> None:
    (tmp_path / "preset.json").write_bytes(value.encode(PresetState("fifo")))
    night = Night(tmp_path, lab_with_history())
    scheduler = night.lab.scheduler
    night.lab.ticker.use_preset(night.auto.in_force)
    night.lab.outcome = SimulatedOutcome(runs_s=1e9)
    night.lab.submit(request=request(gpus=4))
    long, short = (night.lab.submit(request=request(gpus=4), time_limit_s=limit_s) for limit_s in (36_000, 60))
    jobs = [night.lab.job(job_id) for job_id in (short, long)]
    assert [job.id for job in scheduler.answers.in_queue_order(jobs)] == [long, short]
    night.processes.answer(result("fifo", throughput=0.2))
    night.falls()
    assert [job.id for job in scheduler.answers.in_queue_order(jobs)] == [long, short]
    night.falls()
    assert [job.id for job in scheduler.answers.in_queue_order(jobs)] == [short, long]


def test_too_little_history_is_reported_and_starts_nothing(tmp_path: Path) -> None:
    night = Night(tmp_path, lab_with_history(jobs=83, days=3))
    night.falls()
    assert not night.processes.started
    assert sentence(night.auto.document()) == (
        "auto: fair; too little history: 83 jobs that ended in 2.1 days, 200 in 7 days are needed"
    )


def test_a_machine_without_jobs_has_too_little_history(tmp_path: Path) -> None:
    night = Night(tmp_path, Lab(priority=PrioritySettings(preset="auto")))
    night.falls()
    assert "too little history: no job has ended yet" in night.auto.state.why


def test_a_busy_machine_uses_fewer_days(night: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_preset, "MOST_EXPORTED", 200)
    monkeypatch.setattr(auto_preset, "WINDOW_S", 14 * DAY_S)
    night.falls()
    # Of 14 days there are 240, of 7 half as many.
    assert "too little history: 1" in night.auto.state.why


# --- what the process may say ---------------------------------------------------------------------

NONSENSE = {
    "nothing": "cat > /dev/null",
    "no JSON": "cat > /dev/null; echo hello",
    "cut short": "cat > /dev/null; printf '{\"jobs\": 24'",
    "another document": "cat > /dev/null; echo '{\"worth\": 3}'",
    "no presets": "cat > /dev/null; echo '{\"jobs\": 5}'",
    "nested": "cat > /dev/null; yes '[' | head -c 100000",
    "without end": "yes",
    "bytes": "head -c 3000 /dev/urandom",
}


@pytest.mark.parametrize("says", NONSENSE.values(), ids=NONSENSE.keys())
def test_invalid_output_changes_nothing_and_the_next_night_retries(night: Night, says: str) -> None:
    night.processes.says = says
    night.falls()
    assert night.auto.in_force == "fair"
    assert night.auto.state.problem == "the process that replays the last weeks wrote invalid output"
    assert night.auto.state.judgement is None
    night.processes.answer(result())
    night.falls()
    assert night.auto.state.problem is None
    assert night.auto.state.judgement is not None


@pytest.mark.parametrize(
    "parts",
    [
        {"jobs": 0},
        {"jobs": -5},
        {"gains": {}},
        {"worth": {}},
        {"worth": {"quick": result().worth["fair"]}},
        {"worth": {**result().worth, "fifo": replace(result().worth["fifo"], completion_s=0.0)}},
        {"worth": {**result().worth, "fifo": replace(result().worth["fifo"], completion_s=-1.0)}},
        {"worth": {**result().worth, "fifo": replace(result().worth["fifo"], wide_wait_s=-1.0)}},
        {"gains": {**result().gains, "fifo": replace(result().gains["fifo"], p=-0.1)}},
        {"gains": {**result().gains, "fair": result().gains["fifo"]}},
    ],
)
def test_impossible_values_are_invalid_output(night: Night, parts: dict[str, Any]) -> None:
    night.processes.answer(replace(result(throughput=0.5), **parts))
    night.falls()
    night.falls()
    assert night.auto.in_force == "fair"
    assert "invalid output" in (night.auto.state.problem or "")


def test_an_error_of_the_process_is_passed_on(night: Night) -> None:
    night.processes.answer(replace(result(), error="no job can be replayed"))
    night.falls()
    assert night.auto.state.problem == "the last weeks could not be replayed: no job can be replayed"
    assert night.auto.state.most_jobs == MOST_JOBS


def test_a_killed_process_changes_nothing_and_the_next_gets_fewer_jobs(night: Night) -> None:
    night.processes.says = "kill -9 $$"
    night.falls()
    assert night.auto.state.problem == "the process that replays the last weeks has ended early (signal 9)"
    assert (night.auto.in_force, night.auto.state.most_jobs) == ("fair", MOST_JOBS // 2)
    for _ in range(10):
        night.falls()
    assert night.auto.state.most_jobs == 1000


def test_a_slow_process_is_ended(night: Night) -> None:
    night.processes.says = "exec sleep 1000"
    night.begins()
    night.monotonic = WALL_S - 1
    night.auto.poll()
    assert night.auto.is_judging
    night.monotonic = WALL_S + 1
    night.auto.poll()
    assert not night.auto.is_judging
    assert night.auto.state.problem == "replaying the last weeks took longer than 3 hours"
    assert night.processes.started[0].wait(10) == -9


def test_a_stubborn_process_does_not_block_the_daemon(night: Night) -> None:
    night.processes.says = "trap '' TERM; exec 1>&-; exec sleep 1000"
    night.begins()
    wait_until(lambda: night.auto.poll() is False, what="a poll")
    assert night.auto.is_judging
    night.auto.close()
    assert night.processes.started[0].wait(10) == -9


def test_an_ending_daemon_ends_the_process(night: Night) -> None:
    night.processes.says = "exec sleep 1000"
    night.begins()
    night.auto.close()
    assert night.processes.started[0].wait(10) == -9
    assert night.restart().state.judgement is None


def test_choosing_a_preset_manually_ends_the_process(night: Night) -> None:
    night.processes.says = "exec sleep 1000"
    night.begins()
    night.lab.scheduler.settings = replace(night.lab.scheduler.settings, priority=preset("slurm"))
    night.auto.poll()
    assert not night.auto.is_judging
    assert night.processes.started[0].wait(10) == -9
    assert night.auto.in_force == "slurm"


def test_a_process_that_cannot_start_is_only_a_problem(night: Night) -> None:
    def fails(fd: int, limits: object) -> Any:
        raise OSError(12, "Cannot allocate memory")

    night.auto = AutoPreset(night.lab.ticker, night.path, start=fails)
    night.falls()
    assert night.auto.state.problem == (
        "the process that replays the last weeks cannot be started: cannot allocate memory"
    )
    assert night.auto.state.most_jobs == MOST_JOBS


def test_a_process_without_permission_says_who_needs_it(night: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "is_system", lambda: True)
    night.processes.says = "exit 1"
    night.falls()
    assert night.auto.state.problem == (
        "the process that replays the last weeks has ended early (exit code 1); it runs as nobody, who must be able to "
        f"run {sys.executable}"
    )
    assert night.auto.state.most_jobs == MOST_JOBS


def test_an_unreadable_table_is_only_a_problem(night: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> Any:
        raise NotReady("the table is away", "put it back")

    monkeypatch.setattr(night.lab.store, "ended_jobs", fails)
    night.falls()
    assert night.auto.state.problem == "the history could not be exported: the table is away"
    assert not night.auto.is_judging


# --- what it is given -----------------------------------------------------------------------------


def test_the_export_has_no_user_text(night: Night, tmp_path: Path) -> None:
    night.processes.says = f"cat > {tmp_path}/seen"
    night.falls()
    seen = (tmp_path / "seen").read_text()
    assert len(seen.splitlines()) == 241
    for word in ("secret", "hunter2", "/home/ann", "python"):
        assert word not in seen


def test_only_the_export_can_be_read(night: Night) -> None:
    night.processes.says = "echo x >> /proc/self/fd/0 2> /dev/null; echo x >&0"
    night.falls()
    assert night.processes.started[0].returncode != 0
    assert sorted(path.name for path in Path(night.path).parent.iterdir()) == ["preset.json"]


# --- asked for ------------------------------------------------------------------------------------


def test_an_admin_can_request_a_judgement_at_once(night: Night) -> None:
    night.processes.answer(result(throughput=0.2))
    night.auto.judge_now()
    with pytest.raises(Refused, match="being evaluated"):
        night.auto.judge_now()
    night.is_judged()
    assert night.auto.state.candidate == "throughput"
    night.auto.judge_now()
    night.is_judged()
    # The second time the same day is no second opinion.
    assert (night.auto.in_force, night.auto.state.candidate) == ("fair", "throughput")


def test_judging_with_a_manually_chosen_preset_changes_nothing(tmp_path: Path) -> None:
    night = Night(tmp_path, lab_with_history(preset="slurm"))
    night.processes.answer(result("slurm", throughput=0.4))
    for _ in range(2):
        night.auto.judge_now()
        night.is_judged()
        night.lab.clock.advance(DAY_S)
    table = night.auto.table()
    assert (table["in_force"], table["compared_with"], table["why"]) == ("slurm", "slurm", "the settings say so")
    assert [one["preset"] for one in table["presets"] if one["in_force"]] == ["slurm"]
    assert table["presets"][1]["gain"]["better"] == 11
    assert night.auto.state.in_force == "fair"


# --- the file -------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{", "null", '{"in_force": 3}', '{"in_force": "quick"}', "\x00\xff"])
def test_a_broken_file_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / "preset.json").write_text(text, encoding="latin-1")
    assert read_state(str(tmp_path / "preset.json")) == PresetState()


def test_an_unsaved_choice_holds_until_the_restart(night: Night, tmp_path: Path) -> None:
    night.processes.answer(result(throughput=0.2))
    night.auto.poll()
    (tmp_path / "preset.json.new").mkdir()
    night.falls()
    night.falls()
    assert night.auto.in_force == "throughput"
    assert night.restart().in_force == "fair"


def test_the_state_is_world_readable(night: Night) -> None:
    night.auto.poll()
    assert Path(night.path).stat().st_mode & 0o777 == 0o644


def test_several_nodes_are_not_judged(tmp_path: Path) -> None:
    lab = Lab(more_nodes=("n2",), priority=PrioritySettings(preset="auto"))
    night = Night(tmp_path, lab)
    with pytest.raises(Refused, match="this cluster has 2"):
        night.auto.judge_now()
    night.falls()
    assert not night.processes.started
    assert "this cluster has 2" in str(night.auto.document()["problem"])
