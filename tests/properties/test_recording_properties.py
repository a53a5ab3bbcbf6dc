"""What is written down of the policy's input gives exactly that back, and everything else is refused in a sentence."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from random import Random

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st
from strategies import settings, snapshots

from gpusched import quickjson
from gpusched.addons.simulate.recording import BadRecording, Recording, decode, encode
from gpusched.model import value as values
from gpusched.model.job import Request
from gpusched.model.resources import Resources
from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey, PendingClass, Placement, Snapshot, Usage, Window
from gpusched.model.value import Value, fields, replace
from gpusched.scheduler.planner import decide
from gpusched.testing import NOW, node, snapshot

TEXTS = st.text(st.characters(exclude_categories=()), max_size=4)
"""Also what bytes that are not UTF-8 become."""
NUMBERS = (0.0, 1.0, 0.1, 1 / 3, 1e300, -1e-300, 1795302342.6693985)


def some_value(kind: typing.Any, dice: Random, depth: int = 0) -> typing.Any:
    """Any value of a type of the model."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return some_value(parts[0], dice, depth)
    if origin in (types.UnionType, typing.Union):
        return None if dice.random() < 0.3 else some_value(parts[0], dice, depth)
    if origin is tuple and parts[-1] is Ellipsis:
        count = 0 if depth > 3 else dice.randrange(3)
        return tuple(some_value(parts[0], dice, depth + 1) for _ in range(count))
    if origin is tuple:
        return tuple(some_value(part, dice, depth) for part in parts)
    if origin is not None and issubclass(origin, Mapping):
        return {some_text(dice): some_value(parts[1], dice, depth + 1) for _ in range(dice.randrange(3))}
    if isinstance(kind, type) and issubclass(kind, Value):
        return kind(**{one.name: some_value(one.type, dice, depth + 1) for one in fields(kind)})
    if kind is str:
        return some_text(dice)
    if kind is float:
        return dice.choice(NUMBERS)
    return dice.random() < 0.5 if kind is bool else dice.choice([0, 1, -1, 42, 1 << 63, -(1 << 63), 1 << 53 | 1])


def some_text(dice: Random) -> str:
    return "".join(dice.choice('ab "\\/\n\x00\x1b\u00e4\u2028\ud800\U0001f600') for _ in range(dice.randrange(4)))


def through(document: typing.Any) -> typing.Any:
    """As a file has it."""
    return quickjson.loads(quickjson.dumps(document))


@pytest.mark.parametrize("kind", [Settings, ClassKey, Placement, PendingClass, Usage, Window])
@given(seed=st.integers(0, 1 << 32))
@effort(max_examples=20)
def test_every_value_round_trips(kind, seed):
    value = some_value(kind, Random(seed))
    back = values.convert(through(values.plain(value)), kind)
    assert back == value
    assert values.decode(values.encode(value), kind) == value
    # Equality takes 1 for 1.0, of which other words are made.
    assert repr(back) == repr(value)


@effort(max_examples=20)
@given(case=snapshots(), chosen=settings(), names=st.dictionaries(st.integers(1, 12), TEXTS, max_size=3), text=TEXTS)
def test_a_recording_round_trips_and_replays_to_the_same_decision(case, chosen, names, text):
    before = replace(case[0], name_of=lambda job_id: names.get(job_id, str(job_id)))
    usage = (Usage("a", text, Resources(), NOW),)
    recording = Recording.of(replace(before, usage=usage), chosen, "0.1.0", (text,))
    back = decode(through(encode(recording)))
    assert back == recording
    assert repr(back.snapshot) == repr(recording.snapshot)
    plan, again = decide(replace(before, usage=usage), chosen), decide(back.snapshot, back.settings)
    assert again.starts == plan.starts
    assert (again.reservations, again.preempts, again.resumes) == (plan.reservations, plan.preempts, plan.resumes)
    assert dict(again.reasons) == dict(plan.reasons)
    assert again.first_blocked == plan.first_blocked


def flat(part: typing.Any) -> typing.Any:
    """A part of a document as version 1 had it."""
    if isinstance(part, list):
        return [flat(item) for item in part]
    if not isinstance(part, dict):
        return part
    made = {name: flat(item) for name, item in part.items() if name != "terms"}
    return made | flat(part["terms"]) if "terms" in part else made


@effort(max_examples=20)
@given(case=snapshots())
def test_a_document_of_version_1_is_read(case):
    recording = Recording.of(case[0], Settings(), "0.1.0")
    document = through(encode(recording))
    document |= {"snapshot_version": 1, "snapshot": flat(document["snapshot"])}
    for held in document["snapshot"]["allocations"]:
        if held["request"] == through(values.plain(Request())):
            held["request"] = None
    assert decode(document) == recording


WRONG = (None, True, -1, 1e999, 1 << 70, "x", "Infinity", [], {}, [[]], {"__class__": "os"}, float("nan"))


@given(case=snapshots(), seed=st.integers(0, 1 << 32))
def test_a_changed_part_is_read_as_written_or_refused_with_its_path(case, seed):
    dice = Random(seed)
    document = through(encode(Recording.of(case[0], Settings())))
    holder, key = _some_place(document, dice)
    kind = dice.randrange(3)
    if kind == 0:
        holder[key] = dice.choice(WRONG)
    elif kind == 1:
        del holder[key]
    elif isinstance(holder, dict):
        holder["more"] = 1
    else:
        holder.append(dice.choice(WRONG))
    refused = None
    try:
        read = decode(document)
    except BadRecording as error:
        refused = error
    if refused is not None:
        assert refused.hint
        assert "\n" not in refused.message
    else:
        # What was put there may be right, or what is missing may be the default.
        assert decode(through(encode(read))) == read


def _some_place(document, dice):
    """Somewhere in a document, at any depth: what holds it, and its key there."""
    holder, key = document, dice.choice(sorted(document))
    while isinstance(holder[key], (dict, list)) and holder[key] and dice.random() < 0.8:
        holder = holder[key]
        key = dice.choice(sorted(holder)) if isinstance(holder, dict) else dice.randrange(len(holder))
    return holder, key


def test_a_partial_document_is_refused():
    text = quickjson.dumps(change())
    for length in range(0, len(text), 41):
        with pytest.raises(ValueError):
            quickjson.loads(text[:length])


def test_the_whole_model_can_be_written():
    """A type that comes new is met here first, not when a snapshot is needed."""
    seen = set()

    def walk(kind):
        for part in typing.get_args(kind):
            walk(part)
        if isinstance(kind, type) and issubclass(kind, Value) and kind not in seen:
            seen.add(kind)
            for one in fields(kind):
                walk(one.type)

    walk(Snapshot)
    walk(Settings)
    assert len(seen) > 30
    for kind in seen - {Snapshot}:
        with pytest.raises(ValueError):
            values.convert("no object", kind)


@pytest.mark.parametrize(
    ("kind", "document", "text"),
    [
        (int, 1.5, "expected `int`, got `float`"),
        (int, True, "expected `int`, got `bool`"),
        (float, "x", "expected `float`, got `str`"),
        (str, 3, "expected `str`, got `int`"),
        (bool, 1, "expected `bool`, got `int`"),
        (tuple[int, ...], {"a": 1}, "expected `array`, got `object`"),
        (tuple[int, ...], [1, "b"], "[1]: expected `int`, got `str`"),
        (tuple[tuple[str, int], ...], [["a", 1], ["b"]], "[1]: expected `array` of length 2"),
        (
            Usage,
            {"account": "a", "user": "u", "used": {"gpus": "x"}, "at": 1},
            "used.gpus: expected `float`, got `str`",
        ),
        (Usage, {"account": "a", "used": {}, "at": 1}, "object missing required field `user`"),
        (
            Usage,
            {"account": "a", "user": "u", "used": {}, "at": 1, "by": 2},
            "object contains unknown field `by`",
        ),
    ],
)
def test_errors_are_reported_with_their_path(kind, document, text):
    with pytest.raises(ValueError) as caught:
        values.convert(document, kind)
    assert text in str(caught.value)


def test_unwritable_values_are_refused():
    with pytest.raises(TypeError, match="function"):
        values.encode(lambda: None)


def change(**more):
    made = json.loads(json.dumps(encode(Recording.of(snapshot(node(gpus=1)), Settings(), "0.1.0"))))
    for path, value in more.items():
        *above, last = path.split("__")
        holder = made
        for name in above:
            holder = holder[int(name)] if isinstance(holder, list) else holder[name]
        holder[last] = value
    return made


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ([], "this is not a gpusched snapshot"),
        ({"schema_version": 1, "jobs": []}, "this is not a gpusched snapshot"),
        (change(snapshot_version=3), "version 3 (gpusched 0.1.0), and this release reads version 2"),
        (change(snapshot_version=0), "version 0 (gpusched 0.1.0)"),
        (change(snapshot_version=True), "version True"),
        (change(snapshot_version="1\x1b[2J"), r"version '1\x1b[2J'"),
        (change(more=1), "object contains unknown field `more`"),
        (change(names={"x": "y"}), "key in names: expected `int`, got `str`"),
        (change(names={"1": 2}), "names[...]: expected `str`, got `int`"),
        (change(plugins=["a", 1]), "plugins[1]: expected `str`, got `int`"),
        (change(snapshot__name_of="os.system"), "snapshot: object contains unknown field `name_of`"),
        (change(snapshot__nodes=[{"name": "a", "cpus": 1, "mem_mib": 1}] * 2), "two nodes of one name"),
        (change(snapshot__nodes__0__gpus__0__index="0"), "snapshot.nodes[0].gpus[0].index: expected `int`, got `str`"),
        (change(snapshot__now="soon"), "snapshot.now: expected `float`, got `str`"),
        (change(snapshot__now=float("nan")), "nan cannot be stored in a snapshot"),
        (change(settings__priority=None), "settings.priority: expected `object`, got `null`"),
    ],
)
def test_a_foreign_document_is_refused(document, text):
    with pytest.raises(BadRecording) as caught:
        decode(document)
    assert text in caught.value.message
    assert caught.value.hint


def test_a_missing_field_has_its_default():
    document = change()
    del document["settings"]["priority"]["order"]
    del document["snapshot"]["windows"]
    assert decode(document).settings == Settings()


def test_sections_of_add_ons_are_left_out_and_older_documents_that_have_them_are_read():
    document = encode(Recording.of(snapshot(), Settings(of_add_ons={"web": Settings()})))
    assert not {"web", "of_add_ons"} & document["settings"].keys()
    document["settings"].update(web={"user": "gpusched-web"}, handover={"commands": "/usr/bin"})
    assert decode(document).settings == Settings()


def test_nesting_depth_is_bounded():
    document = change()
    place = "x"
    for _ in range(3000):
        place = {"node": "n", "gpus": [], "cpus": 1, "mem_mib": 0, "others": [place]}
    document["snapshot"]["windows"] = [{"name": "w", "start_at": 0, "end_at": 1, "held": [place]}]
    with pytest.raises(BadRecording, match="damaged"):
        decode(document)
