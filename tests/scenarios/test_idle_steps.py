"""GPUs that do nothing: since when, what is due, and what is never touched."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.lifecycle.idle import (
    Activity,
    GpuLoadReading,
    IdleStep,
    IdleStreak,
    add_activity,
    add_reading,
    due,
    idle_since,
    is_exempt,
)
from gpusched.model.job import Interactive, JobSpec
from gpusched.model.queue_settings import QosSettings, QueueSettings
from gpusched.model.settings import IdleSettings, Settings
from gpusched.model.value import Value, replace
from gpusched.testing import request, spec

MINUTE = 60.0
POLL_S = 10.0
SETTINGS = IdleSettings(after_s=10 * MINUTE, lower_after_s=20 * MINUTE, then="requeue", then_after_s=30 * MINUTE)


class Stretch(Value):
    """A time in which all readings say the same. CPU time in cores; `logs` says whether a log grows."""

    minutes: float
    utilisation: float | None = 0.0
    traffic: float | None = 0.0
    cores: float | None = 0.0
    logs: bool | None = False


IDLE = Stretch(40)


def live(
    stretches: list[Stretch], settings: IdleSettings = SETTINGS, *, can_requeue: bool = True, done: int = 0
) -> tuple[list[tuple[float, IdleStep]], IdleStreak | None, float]:
    """Steps with the minute in which each was due, what is remembered at the end, and when that is."""
    now, steps, seen = 0.0, [], None
    cpu_s, mark, noted_at = 0.0, 0, 0.0
    for stretch in stretches:
        end = now + stretch.minutes * MINUTE
        while now < end:
            seen = add_reading(seen, GpuLoadReading(now, stretch.utilisation, stretch.traffic), settings)
            cpu_s += (stretch.cores or 0.0) * POLL_S
            mark += bool(stretch.logs)
            if seen.idle_at is not None and now - noted_at >= settings.window_s:
                noted_at = now
                cpu = None if stretch.cores is None else cpu_s
                seen = add_activity(seen, Activity(now, cpu, None if stretch.logs is None else (mark,)), settings)
            step = due(seen, done, now, settings, can_requeue=can_requeue)
            if step is not None:
                assert step > done
                done = step
                steps.append((now / MINUTE, step))
            now += POLL_S
    return steps, seen, now


def kinds(stretches: list[Stretch], settings: IdleSettings = SETTINGS, *, can_requeue: bool = True) -> list[IdleStep]:
    return [step for _, step in live(stretches, settings, can_requeue=can_requeue)[0]]


ALL = [IdleStep.TOLD, IdleStep.LOWERED, IdleStep.ENDED]
SPARED = [IdleStep.TOLD, IdleStep.LOWERED]

TABLE: dict[str, tuple[list[Stretch], list[IdleStep]]] = {
    "nothing at all for long enough takes every step": ([IDLE], ALL),
    "nothing for less than the first time takes none": ([Stretch(9)], []),
    "a run that works is left alone": ([replace(IDLE, utilisation=0.5)], []),
    "one that works a little is left alone": ([replace(IDLE, utilisation=0.03)], []),
    "what cannot be read is not idle": ([replace(IDLE, utilisation=None)], []),
    "a reading that fails begins the time anew": ([Stretch(9), Stretch(1, None), Stretch(9)], []),
    "work in between begins the time anew": ([Stretch(9), Stretch(2, 0.9), Stretch(9)], []),
    "a short blip does not": ([Stretch(6), Stretch(1 / 6, 0.05), Stretch(6)], [IdleStep.TOLD]),
    "processes that use the CPU are spared": ([replace(IDLE, cores=1.0)], SPARED),
    "processes whose CPU time nobody knows are spared": ([replace(IDLE, cores=None)], SPARED),
    "traffic in the cards' memory spares": ([replace(IDLE, traffic=0.1)], SPARED),
    "traffic that nobody knows spares": ([replace(IDLE, traffic=None)], SPARED),
    "a log that grows spares": ([replace(IDLE, logs=True)], SPARED),
    "logs that nobody can look at spare": ([replace(IDLE, logs=None)], SPARED),
    "a checkpoint late in an idle time spares for as long again": (
        [Stretch(28), Stretch(1, logs=True), Stretch(8)],
        SPARED,
    ),
    "and then no more": ([Stretch(28), Stretch(1, logs=True), Stretch(14)], ALL),
}


@pytest.mark.parametrize("name", TABLE)
def test_steps_fall_due(name: str) -> None:
    stretches, expected = TABLE[name]
    assert kinds(stretches) == expected


def test_each_step_comes_at_its_time() -> None:
    steps, _, _ = live([Stretch(5, 1.0), Stretch(60)])
    assert [(round(minute), step) for minute, step in steps] == [
        (15, IdleStep.TOLD),
        (25, IdleStep.LOWERED),
        (35, IdleStep.ENDED),
    ]


OTHER_SETTINGS: dict[str, tuple[IdleSettings, bool, list[IdleStep]]] = {
    "by default nothing is ended": (replace(SETTINGS, then="off"), True, SPARED),
    "a job of --no-requeue is not ended where others are requeued": (SETTINGS, False, SPARED),
    "but where they are cancelled": (replace(SETTINGS, then="cancel"), False, ALL),
    "without a penalty it is told and ended": (replace(SETTINGS, nice=0), True, [IdleStep.TOLD, IdleStep.ENDED]),
    "switched off, nothing happens": (replace(SETTINGS, after_s=0), True, []),
}


@pytest.mark.parametrize("name", OTHER_SETTINGS)
def test_other_settings_change_the_steps(name: str) -> None:
    settings, can_requeue, expected = OTHER_SETTINGS[name]
    assert kinds([IDLE], settings, can_requeue=can_requeue) == expected


EXEMPT: dict[str, tuple[JobSpec, bool]] = {
    "an ordinary job": (spec(request=request(gpus=1)), False),
    "a job without GPUs": (spec(), True),
    "one that says so": (spec(request=request(gpus=1), ignore_idle=True), True),
    "one in the foreground with a lease that ends it sooner": (
        spec(request=request(gpus=1), interactive=Interactive(lease_s=60)),
        True,
    ),
    "one in the foreground with a long lease": (
        spec(request=request(gpus=1), interactive=Interactive(lease_s=43200)),
        False,
    ),
    "one in the foreground without": (spec(request=request(gpus=1), interactive=Interactive()), False),
    "in a queue that says so": (spec(request=request(gpus=1), queue="notebooks"), True),
    "in a queue below one that says so": (spec(request=request(gpus=1), queue="course"), True),
    "with a QOS that says so": (spec(request=request(gpus=1), qos="debug"), True),
}


@pytest.mark.parametrize("name", EXEMPT)
def test_exempt_runs_are_not_ended(name: str) -> None:
    settings = Settings(
        queue={
            "default": QueueSettings("default"),
            "notebooks": QueueSettings("notebooks", ignore_idle=True),
            "course": QueueSettings("course", parent="notebooks"),
        },
        qos={"debug": QosSettings("debug", ignore_idle=True)},
    )
    asked, expected = EXEMPT[name]
    assert is_exempt(asked, settings) is expected


# --- whatever happens -----------------------------------------------------------------------------

STRETCHES = st.lists(
    st.builds(
        Stretch,
        minutes=st.floats(0.1, 25),
        utilisation=st.none() | st.sampled_from([0.0, 0.01, 0.02, 0.03, 0.5, 1.0]),
        traffic=st.none() | st.sampled_from([0.0, 0.01, 0.5]),
        cores=st.none() | st.sampled_from([0.0, 0.05, 0.5, 8.0]),
        logs=st.none() | st.booleans(),
    ),
    min_size=1,
    max_size=8,
)
ANY_SETTINGS = st.builds(
    IdleSettings,
    after_s=st.sampled_from([0.0, 120.0, 600.0]),
    lower_after_s=st.sampled_from([0.0, 600.0, 1200.0]),
    then_after_s=st.sampled_from([0.0, 600.0, 1800.0]),
    nice=st.sampled_from([0, 500]),
    then=st.sampled_from(["off", "requeue", "cancel"]),
)


@given(STRETCHES, ANY_SETTINGS)
def test_each_step_comes_at_most_once_and_in_order(stretches: list[Stretch], settings: IdleSettings) -> None:
    found = kinds(stretches, settings)
    assert found == sorted(set(found))


@given(STRETCHES, ANY_SETTINGS, st.sampled_from(["busy", "unknown"]))
def test_a_busy_or_unknown_run_is_never_touched(stretches: list[Stretch], settings: IdleSettings, what: str) -> None:
    value = None if what == "unknown" else 0.5
    assert kinds([replace(one, utilisation=value) for one in stretches], settings) == []


@given(STRETCHES, ANY_SETTINGS, st.sampled_from([0.03, 0.5, None]))
def test_no_step_is_due_right_after_work_or_a_gap(
    stretches: list[Stretch], settings: IdleSettings, value: float | None
) -> None:
    _, seen, now = live(stretches, settings)
    assert seen is not None
    seen = add_reading(seen, GpuLoadReading(now, value, 0.0), settings)
    assert idle_since(seen, now, settings) is None
    assert due(seen, 0, now, settings, can_requeue=True) is None


@given(STRETCHES, ANY_SETTINGS, st.sampled_from(["cores", "traffic", "logs"]), st.booleans())
def test_no_run_is_ended_for_idle_gpus_alone(
    stretches: list[Stretch], settings: IdleSettings, what: str, is_known: bool
) -> None:
    value = {"cores": 0.5, "traffic": 0.5, "logs": True}[what] if is_known else None
    idle = [replace(one, utilisation=0.0, **{what: value}) for one in stretches]
    assert IdleStep.ENDED not in kinds(idle, settings)


@given(STRETCHES, st.floats(181, 1e6))
def test_a_pause_of_the_daemon_does_not_count(stretches: list[Stretch], pause_s: float) -> None:
    _, seen, now = live([replace(one, utilisation=0.0) for one in stretches])
    assert seen is not None
    seen = add_reading(seen, GpuLoadReading(now + pause_s, 0.0, 0.0), SETTINGS)
    assert seen.idle_at is None


def test_a_single_busy_reading_holds_every_step_back() -> None:
    _, seen, now = live([Stretch(40.5)])
    assert idle_since(seen, now, SETTINGS) is not None
    seen = add_reading(seen, GpuLoadReading(now, 0.05, 0.0), SETTINGS)
    assert seen.mean <= SETTINGS.utilisation
    assert due(seen, 0, now, SETTINGS, can_requeue=True) is None
