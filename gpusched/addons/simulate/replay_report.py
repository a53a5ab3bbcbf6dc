"""gpusched debug snapshot writes the policy's input; gpusched replay runs the policy on it again."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpusched.addons.simulate.debug import how_many
from gpusched.addons.simulate.policies import DEFAULT, policies_of
from gpusched.addons.simulate.recording import BadRecording
from gpusched.addons.simulate.replay import Replay, differences, is_same, notes, read_recording, summary
from gpusched.cli import output, tables
from gpusched.cli.forecast import ORDERS_BY_WEIGHT, priority_text
from gpusched.config.schema import SETTINGS, value_of
from gpusched.errors import UsageError
from gpusched.model.settings import Settings
from gpusched.model.units import about, format_duration, gpu_list, plural, printable

RECORDED = "recorded"
"""Name of the settings stored in the file itself."""


# --- debug snapshot -------------------------------------------------------------------------------


# --- replay ---------------------------------------------------------------------------------------


def show(
    file: str, *, job: str | None, policies: Sequence[str], config: str | None, as_json: bool, is_quiet: bool
) -> None:
    """Print the plan of a recorded snapshot, and its differences under other settings."""
    if is_quiet and as_json:
        raise UsageError("--quiet and --json cannot be combined", "leave one out")
    if is_quiet and len(policies) > 1:
        raise UsageError("--quiet takes a single policy", "name one")
    recording = read_recording(file)
    _check_settings(recording.settings, file)
    base = Replay(recording, recording.settings, RECORDED)
    others = [Replay(recording, chosen, name) for name, chosen in _others(recording.settings, policies, config)]
    if is_quiet:
        _print_quietly(others[-1] if others else base, job)
    elif as_json:
        output.print_json(_document(base, others, job))
    else:
        _print(base, others, job)


def _others(recorded: Settings, policies: Sequence[str], config: str | None) -> list[tuple[str, Settings]]:
    """Settings by name, as in `gpusched simulate`; policies extend the recorded settings."""
    file = None if config is None else Path(config)
    names = policies or ([] if file is None else [DEFAULT])
    if not names:
        return []
    return [(one.name, one.settings) for one in policies_of(names, file, site=recorded)]


def _check_settings(settings: Settings, file: str) -> None:
    """Reject values that no config file could contain, before they reach the policy. Raises: BadRecording."""
    for path, known in SETTINGS.items():
        value = value_of(settings, path)
        if value is not None and known.rule is not None and not known.rule.admits(value):
            shown = printable(repr(value), 40)
            raise BadRecording(
                f"{printable(file)}: the snapshot is damaged: settings.{path} is {shown}, not {known.allowed}",
                "write a new one with: gpusched debug snapshot FILE",
            )


def _document(base: Replay, others: Iterable[Replay], job: str | None) -> dict[str, Any]:
    def one(replay: Replay) -> dict[str, Any]:
        if job is not None:
            return {"policy": replay.name, "job": replay.of_job(job)}
        return replay.document()

    changed = [{**one(other), "changes": differences(base, other)} for other in others]
    recording = base.recording
    return {"file": summary(recording), "notes": notes(recording), "plan": one(base), "others": changed}


def _print_quietly(replay: Replay, job: str | None) -> None:
    if job is not None:
        found = replay.of_job(job)
        sys.stdout.write(f"{found.get('reason') or found['verdict']}\n")
        return
    sys.stdout.write("".join(f"{start['job']}\n" for start in replay.document()["starts"]))


def _print(base: Replay, others: Sequence[Replay], job: str | None) -> None:
    recording = base.recording
    # Before anything is printed: the job may not exist.
    of_job = [] if job is None else [(replay, replay.of_job(job)) for replay in (base, *others)]
    found = summary(recording)
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(found["now"]))
    counts = f"{plural(found['nodes'], 'node')}, {plural(found['gpus'], 'GPU')}"
    jobs = how_many(found["running"], found["waiting"])
    _say(f"snapshot of {at} by gpusched {found['release']}: {counts}; {jobs}")
    for text in notes(recording):
        output.note("gpusched", text)
    for replay, one in of_job:
        _print_job(replay, one)
    if of_job:
        return
    _print_plan(base)
    for other in others:
        _print_changes(differences(base, other), other)


def _say(text: str) -> None:
    sys.stdout.write(f"{printable(text)}\n")


def _head(text: str) -> None:
    sys.stdout.write("\n")
    _say(text)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    tables.print_table(titles, [[printable(cell) for cell in row] for row in rows])


def _print_plan(replay: Replay) -> None:
    made = replay.document()
    if made["starts"]:
        _head("starts now")
        _table(("JOB", "USER", "QUEUE", "ASKS", "WHERE"), ([*_who(one), _where(one)] for one in made["starts"]))
    else:
        _head("nothing starts now")
    for one in made["preempts"]:
        _say(f"job {one['job']}: {one['mode']}, {one['text']}")
    for name in made["resumes"]:
        _say(f"job {name} resumes")
    if made["reservations"]:
        _head("reserved for")
        rows = ([*_who(one), _when(one["in_s"]), _where(one)] for one in made["reservations"])
        _table(("JOB", "USER", "QUEUE", "ASKS", "FROM", "WHERE"), rows)
    if made["waiting"]:
        _head("waits")
        waiting = [
            [str(one["jobs"]), one["first"] or "-", *_whose(one), f"({one['reason']}) {one['text']}"]
            for one in made["waiting"]
        ]
        _table(("JOBS", "FIRST", "USER", "QUEUE", "ASKS", "REASON"), waiting)
    if made["has_more"]:
        _head("The snapshot cuts a class short and all listed jobs of it start; those behind them are not planned.")


def _who(one: Mapping[str, Any]) -> list[str]:
    return [one["job"], *_whose(one)]


def _whose(one: Mapping[str, Any]) -> list[str]:
    return [one.get("user", "-"), one.get("queue", "-"), one.get("asks", "-")]


def _where(one: Mapping[str, Any]) -> str:
    places = [one, *one["others"]]
    return "; ".join(place["node"] + (f" GPU {gpu_list(place['gpus'])}" if place["gpus"] else "") for place in places)


def _when(in_s: float | None) -> str:
    return "unknown" if in_s is None else "now" if in_s <= 0 else f"in {about(in_s)}"


def _print_changes(found: Mapping[str, Any], other: Replay) -> None:
    _head(f"under {other.name}")
    if is_same(found):
        _say("  the same starts, places and reservations")
    for one in found["start_too"]:
        _say(f"  job {one['job']} also starts, on {_where(one)}")
    for one in found["start_no_more"]:
        _say(f"  job {one['job']} does not start now, as it would on {_where(one)}")
    for one in found["elsewhere"]:
        _say(f"  job {one['job']} starts on {_where(one['to'])} instead of {_where(one['from'])}")
    now = other.recording.snapshot.now
    kept = {kept.job_id for kept in other.plan.reservations}
    name_of = other.recording.snapshot.name_of
    names = {name_of(job_id) for job_id in kept}
    for one in found["reserved"]:
        if one["job"] in names:
            when = _when(None if one["to"] is None else one["to"] - now)
            _say(f"  job {one['job']} has a reservation, from: {when}")
        else:
            _say(f"  job {one['job']} has no reservation")
    for name in found["make_room_too"]:
        _say(f"  job {name} is also preempted")
    for name in found["make_room_no_more"]:
        _say(f"  job {name} is not preempted")


def _print_job(replay: Replay, one: Mapping[str, Any]) -> None:
    name = "the recorded settings" if replay.name == RECORDED else replay.name
    _head(f"job {one['job']} under {name}")
    if one["verdict"] in ("runs", "makes room"):
        text = f", and {one['text']}" if one["text"] else ""
        _say(f"  it has run for {format_duration(one['ran_s'])} on {_where(one)}{text}")
        return
    _say(f"  of {one['user']} in queue {one['queue']}; it needs {one['asks']}")
    if one["verdict"] == "starts":
        _say(f"  starts now on {_where(one)}")
    else:
        _say(f"  waits ({one['reason']}): {one['text']}")
        if one["reservation"] is not None:
            in_s = one["reservation"]["start_at"]
            when = _when(None if in_s is None else in_s - replay.recording.snapshot.now)
            _say(f"  reserved for it on {_where(one['reservation'])}, from: {when}")
    if one["place"] is not None:
        _say(f"  queue position: {one['place']} of {one['of']}, order {one['order']}")
    if one["order"] in ORDERS_BY_WEIGHT:
        _say(f"  priority: {priority_text(one['priority'])}")
    for help_ in one.get("would_help", ()):
        _say(f"  {help_['text']}")
