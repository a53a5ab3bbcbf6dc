"""Run times learned from earlier jobs, as the memory hands them to the policy where the settings ask for it."""

from __future__ import annotations

import pytest

from gpusched.daemon.state import DaemonState
from gpusched.daemon.state_settings import StateSettings
from gpusched.model.job import ArraySpec
from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.settings import Settings
from gpusched.model.states import JobState
from gpusched.model.value import replace
from gpusched.predict.family import Invocation, family, invocation_of
from gpusched.predict.predictor import RunTimeGuess
from gpusched.scheduler.timeline import end_of
from gpusched.testing import NOW, job, launch, run

NOT_ASKED = Settings(priority=PrioritySettings(predict=False))
ASKED = Settings(priority=PrioritySettings(predict=True))


def predict(one):
    """Jobs without a limit take ten minutes on average, and three in five of them eight."""
    return None if one.spec.time_limit_s else RunTimeGuess(480, 600)


@pytest.mark.parametrize(("settings", "planned"), [(ASKED, True), (NOT_ASKED, False)], ids=["asked", "not asked"])
def test_pending_jobs_without_a_limit_carry_predictions(settings, planned):
    state = DaemonState(StateSettings.of(settings, predict))
    state.put_job(job(1), NOW)
    state.put_job(job(2, time_limit_s=60), NOW)
    keys = {view.jobs[0].id: view.key for view in state.eligible.views()}
    assert (keys[1].predicted_s is not None) is planned
    assert keys[1].planned_s == (480 if planned else None)
    assert keys[2].predicted_s is None
    assert keys[2].planned_s == 60


def test_running_jobs_without_a_limit_are_planned_to_end():
    state = DaemonState(StateSettings.of(ASKED, predict))
    for number, limit_s in ((1, None), (2, 60)):
        one = job(number, state=JobState.RUNNING, run=1, time_limit_s=limit_s)
        state.put_job(one, NOW)
        state.put_run(run(one, start_at=NOW))
    assert state.holds["1.1"].predicted_end_at == NOW + 480
    assert state.holds["2.1"].predicted_end_at is None


def test_pending_jobs_are_replanned_when_the_setting_changes():
    state = DaemonState(StateSettings.of(NOT_ASKED, predict))
    state.put_job(job(1), NOW)
    state.reconfigure(StateSettings.of(ASKED, predict))
    assert state.eligible.views()[0].key.predicted_s is not None


def test_only_jobs_with_changed_predictions_are_replanned():
    thought = {"ann": 600, "bob": 900}
    asked = []

    def guess(one):
        asked.append(one.id)
        return RunTimeGuess(thought[one.user], thought[one.user])

    state = DaemonState(StateSettings.of(ASKED, guess))
    for number in range(1, 41):
        state.put_job(job(number, time_limit_s=3600, user="ann" if number % 2 else "bob", queued_at=NOW), NOW)
    asked.clear()
    families = [family(state.jobs[1]), family(state.jobs[2])]
    assert not state.rethink(families)
    # One of each class was asked for, however many wait.
    assert len(asked) == 2
    thought["ann"] = 60
    assert state.rethink(families)
    assert [(view.key.plan_s, view.total, [one.id for one in view.jobs[:2]]) for view in state.eligible.views()] == [
        (60, 20, [1, 3]),
        (900, 20, [2, 4]),
    ]
    gone = replace(state.jobs[1], state=JobState.CANCELLED)
    state.put_job(gone, NOW)
    assert state.eligible.views()[0].jobs[0].id == 2


def test_a_line_that_becomes_known_takes_its_jobs_out_of_the_class_of_their_family():
    known: dict[Invocation, int] = {}
    asked = []

    def guess(one):
        asked.append(one.id)
        if one.spec.time_limit_s is not None:
            return None
        length_s = known.get(invocation_of(one), 600)
        return RunTimeGuess(length_s, length_s)

    state = DaemonState(StateSettings.of(ASKED, guess, is_known_invocation=known.__contains__))
    for number in range(1, 13):
        state.put_job(job(number, launch=launch("train.sh", str(number % 3)), queued_at=NOW), NOW)
    # What its user has stated counts for this one, whatever others with its line took.
    state.put_job(job(13, launch=launch("train.sh", "0"), time_limit_s=60, queued_at=NOW), NOW)

    def classes():
        views = state.eligible.views()
        return {(view.key.time_limit_s, view.key.plan_s): [one.id for one in view.jobs] for view in views}

    of_family, invocation = family(state.jobs[1]), invocation_of(state.jobs[3])
    assert classes() == {(60, None): [13], (None, 600): list(range(1, 13))}
    asked.clear()
    known[invocation] = 50
    assert state.rethink([of_family], invocations=[invocation])
    assert classes() == {(60, None): [13], (None, 50): [3, 6, 9, 12], (None, 600): [1, 2, 4, 5, 7, 8, 10, 11]}
    # Once for the line and once for each class of the family that is not the line's.
    assert len(asked) == 3
    # Other ends of the family say nothing about this line; its own do.
    assert not state.rethink([of_family])
    known[invocation] = 70
    assert not state.rethink([of_family])
    assert state.rethink([], invocations=[invocation])
    assert classes()[None, 70] == [3, 6, 9, 12]
    # One that becomes known by the very length that its family has stays where it is, and is its own from then on.
    second = invocation_of(state.jobs[1])
    known[second] = 600
    assert not state.rethink([], invocations=[second])
    state.put_job(replace(state.jobs[3], state=JobState.CANCELLED), NOW)
    known[invocation] = 600
    assert state.rethink([], invocations=[invocation, second])
    assert classes() == {(60, None): [13], (None, 600): [1, 2, *range(4, 13)]}


def test_an_array_is_replanned_with_its_tasks():
    thought = [600]
    state = DaemonState(StateSettings.of(ASKED, lambda one: RunTimeGuess(thought[0], thought[0])))
    array = replace(job(1, time_limit_s=3600, array=ArraySpec("0-4")), tasks_left="0-4")
    state.put_job(array, NOW)
    thought[0] = 60
    assert state.rethink([family(array)])
    view = state.eligible.views()[0]
    assert (view.key.plan_s, view.total) == (60, 5)


def test_jobs_with_a_limit_are_planned_by_predictions_while_those_are_better():
    state = DaemonState(StateSettings.of(ASKED, lambda one: RunTimeGuess(90, 40)))
    state.put_job(job(1, time_limit_s=600), NOW)
    key = state.eligible.views()[0].key
    assert (key.time_limit_s, key.predicted_s, key.planned_s) == (600, 40, 90)
    one = job(2, state=JobState.RUNNING, run=1, time_limit_s=600)
    state.put_job(one, NOW)
    state.put_run(run(one, start_at=NOW))
    held = state.holds["2.1"]
    assert (held.predicted_end_at, held.expected_end_at) == (NOW + 90, NOW + 600)
    assert (end_of(held, NOW + 89), end_of(held, NOW + 90)) == (NOW + 90, NOW + 600)
