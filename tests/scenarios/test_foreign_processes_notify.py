"""Who of those that use a GPU without a job is told, and who is ended: one line for each case."""

from __future__ import annotations

from typing import Any

import pytest

from gpusched.lifecycle.foreign import (
    ForeignEnd,
    ForeignGpuUse,
    ForeignNotice,
    ForeignProcess,
    is_of_the_system,
    messages,
    steps,
)
from gpusched.model.settings import ForeignSettings
from gpusched.model.value import replace

NOW = 100_000.0
MINUTE, HOUR = 60.0, 3600.0
POLITE = ForeignSettings(message=("write", "mail"), message_after_s=900.0, message_every_s=4 * HOUR)
STRICT = replace(POLITE, kill_after_s=2 * HOUR, kill_grace_s=60.0)
EVA = ForeignProcess(
    pid=4711,
    start_ticks=99,
    uid=1001,
    user="eva",
    name="python",
    program="python3.11",
    cards=(ForeignGpuUse("GPU-a", 0, 15360, 4320.0),),
    since_at=NOW - 2 * HOUR,
    waiting=("lab", "lab"),
)

SILENT: dict[str, tuple[ForeignSettings, dict[str, Any]]] = {
    "by default nobody is told anything": (ForeignSettings(), {}),
    "nobody waits for the card": (POLITE, {"waiting": ()}),
    "it has been there for ten minutes only": (POLITE, {"since_at": NOW - 10 * MINUTE}),
    "its owner was told an hour ago": (POLITE, {"told_at": NOW - HOUR, "first_told_at": NOW - HOUR}),
    "its owner is exempt": (replace(STRICT, exempt_users=("eva",)), {}),
    "its program is exempt": (replace(STRICT, exempt_commands=("python3.11",)), {}),
    "those who wait are in a queue that does not count": (replace(STRICT, exempt_queues=("lab",)), {}),
    "it is one of the system's accounts": (STRICT, {"uid": 999}),
    "it is root's": (STRICT, {"uid": 0, "user": "root"}),
    "it draws the screen": (STRICT, {"program": "Xorg"}),
    "it is the MPS server": (STRICT, {"program": "nvidia-cuda-mps-server"}),
    "it was sent TERM half a minute ago": (STRICT, {"first_told_at": NOW - 3 * HOUR, "ending_at": NOW - 30.0}),
    "it could be ended, but nobody waits now": (STRICT, {"first_told_at": NOW - 9 * HOUR, "waiting": ()}),
}


@pytest.mark.parametrize("case", SILENT, ids=str)
def test_no_notice_is_due(case: str) -> None:
    settings, facts = SILENT[case]
    assert steps([replace(EVA, **facts)], settings, NOW) == ()


TOLD: dict[str, tuple[ForeignSettings, dict[str, Any], int, float | None]] = {
    "somebody waits for its card": (POLITE, {}, 2, None),
    "nobody waits, and that does not matter": (replace(POLITE, only_when_wanted=False), {"waiting": ()}, 0, None),
    "its owner was told long ago": (POLITE, {"told_at": NOW - 5 * HOUR, "first_told_at": NOW - 5 * HOUR}, 2, None),
    "only those count whose queue does": (
        replace(POLITE, exempt_queues=("play",)),
        {"waiting": ("play", "lab")},
        1,
        None,
    ),
    "it is to be ended later": (STRICT, {}, 2, 2 * HOUR),
    "it calls itself Xorg, which it is not": (POLITE, {"name": "Xorg", "program": None}, 2, None),
}


@pytest.mark.parametrize("case", TOLD, ids=str)
def test_the_owner_is_notified(case: str) -> None:
    settings, facts, jobs, ends_after_s = TOLD[case]
    (step,) = steps([replace(EVA, **facts)], settings, NOW)
    assert isinstance(step, ForeignNotice)
    assert (step.jobs, step.ends_after_s) == (jobs, ends_after_s)


BOOKED = replace(EVA.cards[0], bookers=frozenset({1002}))


def test_the_owner_of_a_process_on_a_booked_gpu_is_notified_though_no_job_waits() -> None:
    (step,) = steps([replace(EVA, cards=(BOOKED,), waiting=())], STRICT, NOW)
    assert isinstance(step, ForeignNotice)
    (alert,) = messages(step, ("write",), frozenset(), "n1", NOW)
    lines = str(dict(alert.facts)["message"]).splitlines()
    # To adopt it would be refused: the GPU is booked.
    assert lines[1] == "Another user's job has booked GPU 0: please end the process, or have it use another GPU."
    assert lines[2].startswith("Next time: gsub -g 1")


def test_the_owner_of_a_process_beside_an_own_job_is_not_notified() -> None:
    own = replace(BOOKED, bookers=frozenset({EVA.uid}))
    assert steps([replace(EVA, cards=(own,), waiting=())], STRICT, NOW) == ()


def test_a_process_on_a_booked_gpu_is_not_ended_for_its_job() -> None:
    told_long_ago = {"first_told_at": NOW - 9 * HOUR, "told_at": NOW - HOUR}
    assert steps([replace(EVA, cards=(BOOKED,), waiting=(), **told_long_ago)], STRICT, NOW) == ()


ENDED: dict[str, tuple[dict[str, Any], bool]] = {
    "its owner was told two hours ago, and jobs wait": ({"first_told_at": NOW - 2 * HOUR}, False),
    "its grace after TERM is over": ({"first_told_at": NOW - 9 * HOUR, "ending_at": NOW - 60.0}, True),
    "its grace is over, and nobody waits any more": (
        {"first_told_at": NOW - 9 * HOUR, "ending_at": NOW - 60.0, "waiting": ()},
        True,
    ),
}


@pytest.mark.parametrize("case", ENDED, ids=str)
def test_the_process_is_ended(case: str) -> None:
    facts, is_kill = ENDED[case]
    (step,) = steps([replace(EVA, told_at=NOW - HOUR, **facts)], STRICT, NOW)
    assert isinstance(step, ForeignEnd)
    assert step.is_kill is is_kill


def test_no_process_is_ended_without_a_notice() -> None:
    (step,) = steps([replace(EVA, since_at=0.0)], STRICT, NOW)
    assert isinstance(step, ForeignNotice)
    assert steps([replace(EVA, since_at=0.0, told_at=NOW, first_told_at=NOW)], STRICT, NOW + 1) == ()


def test_the_message_says_what_where_since_when_and_what_to_do() -> None:
    (step,) = steps([EVA], STRICT, NOW)
    assert isinstance(step, ForeignNotice)
    (alert,) = messages(step, ("write", "mail"), frozenset(), "n1", NOW)
    assert (alert.uid, alert.targets) == (1001, ("@write", "@mail"))
    assert dict(alert.facts)["message"] == (
        "gpusched on n1: your process 4711 (python) has been on GPU 0 (15G) for 2:00:00 without a job, idle for "
        "1:12:00.\n2 jobs wait for it.\nMake it a job, while it runs, with: gpusched adopt 4711\n"
        "Next time: gsub -g 1 -- COMMAND, or grun -g 1 for a shell.\n"
        "Otherwise it is ended after 2:00:00 if jobs wait for it then."
    )


def test_a_mig_instance_is_shown_by_its_display_name() -> None:
    (step,) = steps([replace(EVA, cards=(ForeignGpuUse("MIG-a", 1021, 9216, None),))], POLITE, NOW)
    assert isinstance(step, ForeignNotice)
    (alert,) = messages(step, ("write",), frozenset(), "n1", NOW)
    assert dict(alert.facts)["gpus"] == "2:1"
    assert "has been on GPU 2:1 (9G) for" in str(dict(alert.facts)["message"])


def test_a_name_cannot_emit_control_characters() -> None:
    (step,) = steps([replace(EVA, name="\x1b[2Jroot")], POLITE, NOW)
    assert isinstance(step, ForeignNotice)
    for alert in messages(step, ("write", "wall"), frozenset({1001, 1002}), "n1", NOW):
        assert "\x1b" not in str(dict(alert.facts)["message"])


def test_wall_names_the_owner_of_the_process() -> None:
    (step,) = steps([EVA], POLITE, NOW)
    assert isinstance(step, ForeignNotice)
    alerts = messages(step, ("write", "notify", "wall"), frozenset({0, 1001, 1002}), "n1", NOW)
    assert [(alert.uid, alert.targets) for alert in alerts] == [(1001, ("@write",)), (1001, ()), (1002, ("@write",))]
    assert "eva's process 4711" in str(dict(alerts[-1].facts)["message"])
    assert len({alert.key for alert in alerts}) == 3


@pytest.mark.parametrize(
    ("program", "is_so"),
    [("Xorg", True), ("gnome-shell", True), ("nvidia-persistenced", True), ("python3", False), (None, False)],
)
def test_system_programs_are_recognized_by_name(program: str | None, is_so: bool) -> None:
    assert is_of_the_system(program) is is_so
