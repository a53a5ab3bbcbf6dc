"""A recorded snapshot is decided on once more, explained and compared; what is no snapshot is refused in a sentence."""

from __future__ import annotations

import io
import json
import sys
from random import Random

import pytest

from gpusched import quickjson
from gpusched.addons.simulate import replay
from gpusched.addons.simulate.policies import under
from gpusched.addons.simulate.recording import BadRecording, Recording, encode
from gpusched.addons.simulate.replay import Replay, differences, is_same, notes, read_recording, summary
from gpusched.cli.admin import main
from gpusched.errors import BrokenInvariant, NotFound, UsageError
from gpusched.model.job import ArraySpec
from gpusched.model.planner_settings import PlacementSettings, PrioritySettings
from gpusched.model.queue_settings import QueueSettings
from gpusched.model.resources import Resources
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Usage
from gpusched.model.value import replace
from gpusched.scheduler.planner import decide
from gpusched.testing import NOW, allocation, job, node, request, snapshot

EASY = Settings(priority=PrioritySettings(order="fifo"))


def waiting(number, gpus, limit_s, *, user="ann", uid=1000, **more):
    asked = request(gpus, cpus=1.0)
    return job(number, uid=uid, user=user, request=asked, time_limit_s=limit_s, submit_at=NOW - 100 + number, **more)


def some_recording(settings=EASY, **more):
    """Four cards, one of them taken for an hour more; 5 needs all, 6 and 8 fit before that, 7 and 9 outlive it."""
    taken = allocation(1, gpus=[0], expected_end_at=NOW + 3600, user="bob", queue="default")
    jobs = [
        waiting(5, 4, 7200),
        waiting(6, 1, 1800, user="bob", uid=1001),
        waiting(7, 1, 86400),
        waiting(8, 2, 600, user="bob", uid=1001),
        waiting(9, 1, 86400),
    ]
    made = snapshot(node(gpus=4), running=[taken], waiting=jobs, **more)
    return Recording.of(replace(made, name_of=lambda number: "7_1" if number == 7 else str(number)), settings, "0.1.0")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "now.json"
    path.write_text(quickjson.dumps({"schema_version": 1, **encode(some_recording())}))
    return path


def typed(monkeypatch, capsys, *words):
    monkeypatch.setattr("sys.argv", ["gpusched", "replay", *map(str, words)])
    code = main()
    return code, capsys.readouterr()


# --- the plan -------------------------------------------------------------------------------------


def test_a_plan_has_placed_starts_reservations_and_a_reason_for_each_class():
    recording = some_recording()
    made = Replay(recording, recording.settings, "recorded").document()
    assert [(one["job"], one["user"], one["node"], one["gpus"]) for one in made["starts"]] == [
        ("6", "bob", "n1", [1]),
        ("8", "bob", "n1", [2, 3]),
    ]
    (kept,) = made["reservations"]
    assert (kept["job"], kept["gpus"], kept["in_s"]) == ("5", [0, 1, 2, 3], 3600.0)
    assert kept["start_at"] == NOW + 3600
    classes = {one["first"]: one for one in made["waiting"]}
    assert {name: one["jobs"] for name, one in classes.items()} == {"5": 1, "7_1": 2}
    assert classes["5"]["reason"] == "Resources"
    assert "needs 4 GPUs" in classes["5"]["text"]
    assert classes["5"]["facts"]["expected_at"] == NOW + 3600
    assert classes["7_1"]["asks"] == "1 GPU and 1 CPU"
    json.dumps(made)


def test_the_plan_equals_the_policy():
    recording = some_recording()
    made, plan = Replay(recording, EASY, "").plan, decide(recording.snapshot, EASY)
    assert (made.starts, made.reservations, dict(made.reasons)) == (plan.starts, plan.reservations, dict(plan.reasons))


def test_one_job_is_explained():
    recording = some_recording()
    asked = Replay(recording, EASY, "")
    starts = asked.of_job("6")
    assert (starts["verdict"], starts["node"], starts["gpus"], starts["place"], starts["of"]) == (
        "starts",
        "n1",
        [1],
        2,
        5,
    )
    blocked = asked.of_job("5")
    assert (blocked["verdict"], blocked["reason"], blocked["place"]) == ("waits", "Resources", 1)
    assert blocked["reservation"]["start_at"] == NOW + 3600
    assert blocked["waited_s"] == 95
    by_name = asked.of_job("7_1")
    assert by_name["verdict"] == "waits"
    assert by_name["reservation"] is None
    assert by_name["priority"]["total"] == pytest.approx(sum(v for k, v in by_name["priority"].items() if k != "total"))
    behind = asked.of_job("9")
    assert behind["reason"] == "Priority"
    assert behind["text"].startswith("waits behind 1 job of its own class")
    runs = asked.of_job("1")
    assert (runs["verdict"], runs["gpus"], runs["ran_s"], runs["ends_at"]) == ("runs", [0], 3600, NOW + 3600)
    with pytest.raises(NotFound, match="job 7 is neither running nor pending"):
        asked.of_job("7")


def test_helpful_changes_are_tried():
    recording = Recording.of(
        snapshot(node(gpus=2), running=[allocation(1, gpus=[0])], waiting=[waiting(2, 2, 60)]), EASY
    )
    (first, *_) = Replay(recording, EASY, "").of_job("2")["would_help"]
    assert first["option"] == "-g 1"
    assert first["text"] == "would start now with -g 1"


def test_a_truncated_class_is_reported():
    jobs = [waiting(number, 1, 60) for number in range(2, 8)]
    recording = Recording.of(snapshot(node(gpus=4), waiting=jobs, front=2), EASY)
    asked = Replay(recording, EASY, "")
    assert asked.document()["has_more"]
    with pytest.raises(NotFound, match="or it is further back in its class"):
        asked.of_job("6")
    assert notes(recording) == ["4 jobs are further back in their classes than the planner looks"]


def test_array_tasks_are_shown_by_their_display_ids():
    array = ArraySpec("0-3", throttle=1)
    tasks = [waiting(number, 1, 60, array=array, array_id=5, task=number - 6) for number in (6, 7)]
    before = replace(
        snapshot(node(gpus=4), waiting=tasks), name_of=lambda number: f"5_{number - 6}" if number > 5 else "5"
    )
    recording = Recording.of(before, EASY)
    made = Replay(recording, EASY, "").document()
    assert [one["job"] for one in made["starts"]] == ["5_0"]
    assert made["waiting"][0]["first"] == "5_1"
    assert made["waiting"][0]["reason"] == "JobArrayTaskLimit"
    assert dict(recording.names) == {6: "5_0", 7: "5_1"}


def test_double_bookings_are_reported():
    both = [allocation(1, gpus=[0]), allocation(2, gpus=[0])]
    found = notes(Recording.of(snapshot(node(gpus=1), running=both), EASY, plugins=("site",)))
    assert found[0] == "plug-ins took part (site) but are not loaded here: the plan may differ from the daemon's"
    assert found[1].startswith("booked wrongly: GPU GPU-n1-0 of node n1 is")


def test_the_size_of_a_snapshot_is_reported():
    assert summary(some_recording()) == {
        "release": "0.1.0",
        "now": NOW,
        "nodes": 1,
        "gpus": 4,
        "running": 1,
        "waiting": 5,
        "classes": 4,
    }


# --- other settings ---------------------------------------------------------------------------------


def test_a_preset_name_changes_order_backfill_and_placement_only():
    base = Settings(
        priority=PrioritySettings(weight_age=7.0, backfill_depth=9),
        placement=PlacementSettings(strategy="fgd"),
        queue={"a": QueueSettings("a", max_gpus=1.0)},
    )
    made = under(base, "sjf+easy/spread")
    assert (made.priority.order, made.priority.backfill, made.priority.backfill_depth) == ("sjf", True, 1)
    assert (made.placement.strategy, made.priority.weight_age) == ("spread", 7.0)
    assert made.queue == base.queue
    with pytest.raises(UsageError, match="'lifo' names no known order"):
        under(base, "lifo")


def test_changes_by_other_settings_are_listed():
    recording = some_recording()
    base = Replay(recording, EASY, "recorded")
    none = Replay(recording, under(EASY, "fcfs"), "fcfs")
    found = differences(base, none)
    assert [one["job"] for one in found["start_no_more"]] == ["6", "8"]
    assert not found["start_too"]
    greedy = differences(base, Replay(recording, under(EASY, "fcfs+greedy"), "fcfs+greedy"))
    assert [one["job"] for one in greedy["start_too"]] == ["7_1", "9"]
    assert [one["job"] for one in greedy["start_no_more"]] == ["8"]
    assert greedy["reserved"] == [{"job": "5", "from": NOW + 3600, "to": None}]
    assert is_same(differences(base, Replay(recording, EASY, "again")))
    spread = replace(EASY, placement=PlacementSettings(strategy="spread"))
    two = snapshot(
        node("n1", gpus=2), node("n2", gpus=2), running=[allocation(1, gpus=[0])], waiting=[waiting(5, 1, 60)]
    )
    both = Recording.of(two, EASY)
    (moved,) = differences(Replay(both, EASY, ""), Replay(both, spread, ""))["elsewhere"]
    assert (moved["job"], moved["from"]["node"], moved["to"]["node"]) == ("5", "n1", "n2")


def test_shares_come_from_the_snapshot():
    """Usage is part of it: who has used more goes second."""
    jobs = [waiting(5, 1, 60, account="a"), waiting(6, 1, 60, user="bob", uid=1001, account="a")]
    used = Usage("a", "ann", Resources(gpus=1e6), NOW)
    plain = Settings(priority=PrioritySettings(backfill=False))
    fair = Recording.of(snapshot(node(gpus=1), waiting=jobs, usage=[used]), plain)
    assert [one["job"] for one in Replay(fair, plain, "").document()["starts"]] == ["6"]
    assert [one["job"] for one in Replay(fair, under(plain, "fcfs"), "").document()["starts"]] == ["5"]


# --- files ----------------------------------------------------------------------------------------


def test_a_file_is_read_as_it_was_written(file):
    assert read_recording(str(file)) == some_recording()


def test_standard_input_is_read(file, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    assert read_recording("-") == some_recording()


def test_a_file_truncated_anywhere_is_refused(file, tmp_path):
    whole = file.read_bytes()
    part = tmp_path / "part.json"
    for length in (*range(0, len(whole) - 1, 97), len(whole) - 1):
        part.write_bytes(whole[:length])
        with pytest.raises(BadRecording, match="is cut short or damaged"):
            read_recording(str(part))


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe\x00",
        b"\x80\x04\x95\x10\x00cos\nsystem\n",
        b"!!python/object:os.system",
        b"[" * 100_000,
        b"9" * 10_000,
    ],
)
def test_a_foreign_file_is_refused(tmp_path, content):
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(BadRecording) as caught:
        read_recording(str(path))
    assert caught.value.hint
    assert "\n" not in caught.value.message


def test_an_oversized_file_is_not_read(file, monkeypatch):
    monkeypatch.setattr(replay, "LARGEST_MIB", 0)
    for path in (str(file), "/dev/zero"):
        with pytest.raises(BadRecording, match="is larger than 0 MiB"):
            read_recording(path)


def test_nothing_named_in_a_file_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "trap.py").write_text("raise SystemExit('loaded')")
    monkeypatch.syspath_prepend(str(tmp_path))
    recording = some_recording(replace(EASY, plugins=("trap",)))
    path = tmp_path / "now.json"
    path.write_text(quickjson.dumps(encode(replace(recording, plugins=("trap",)))))
    read = read_recording(str(path))
    Replay(read, read.settings, "").document()
    assert "trap" not in sys.modules


VALUES = (None, True, -1, 0, 1, 1e308, 1 << 62, "x", "Infinity", "-Infinity", [], {}, 0.5)


@pytest.mark.parametrize("now", [1e308, -1.0])
def test_an_impossible_instant_is_refused(tmp_path, monkeypatch, capsys, now):
    document = encode(some_recording())
    document["snapshot"]["now"] = now
    path = tmp_path / "odd.json"
    path.write_text(quickjson.dumps(document))
    code, shown = typed(monkeypatch, capsys, path)
    assert code == 1
    assert f"the snapshot is damaged: now is {now:g}, which is not an instant" in shown.err


def test_any_change_of_a_file_is_answered_in_a_sentence(tmp_path, monkeypatch, capsys):
    whole = quickjson.loads(
        quickjson.dumps(encode(some_recording(usage=[Usage("a", "ann", Resources(gpus=5.0), NOW)])))
    )
    path = tmp_path / "odd.json"
    codes = set()
    for seed in range(40):
        dice = Random(seed)
        document = json.loads(json.dumps(whole))
        for _ in range(dice.randint(1, 3)):
            holder, key = document, dice.choice(["snapshot", "snapshot", "settings"])
            while isinstance(holder[key], (dict, list)) and holder[key] and dice.random() < 0.93:
                holder = holder[key]
                key = dice.choice(sorted(holder)) if isinstance(holder, dict) else dice.randrange(len(holder))
            holder[key] = dice.choice(VALUES)
        path.write_text(json.dumps(document))
        code, shown = typed(monkeypatch, capsys, path, "--policy", "sjf", *(["--job", "5"] if seed % 2 else []))
        codes.add(code)
        assert "this is a bug in gpusched" not in shown.err, (seed, shown.err)
        assert code in (0, 1)
        if code:
            assert len(shown.err.splitlines()) == 2, shown.err
    assert codes == {0, 1}


def test_a_policy_failure_is_reported_and_shown_whole_on_request(monkeypatch):
    def fails(*_):
        raise ZeroDivisionError("no")

    monkeypatch.setattr(replay, "decide", fails)
    recording = some_recording()
    with pytest.raises(BrokenInvariant, match="the planner fails on this snapshot: ZeroDivisionError: no"):
        Replay(recording, EASY, "")
    monkeypatch.setenv("GPUSCHED_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        Replay(recording, EASY, "")


# --- as typed ---------------------------------------------------------------------------------------


def test_the_text_output_is_readable(file, monkeypatch, capsys):
    code, shown = typed(monkeypatch, capsys, file, "--policy", "fcfs,fcfs+easy")
    assert code == 0
    lines = shown.out.splitlines()
    assert lines[0].endswith("by gpusched 0.1.0: 1 node, 4 GPUs; 1 job runs, 5 wait")
    words = [line.split() for line in lines]
    assert ["6", "bob", "default", "1", "GPU", "and", "1", "CPU", "n1", "GPU", "1"] in words
    assert [
        "5",
        "ann",
        "default",
        "4",
        "GPUs",
        "and",
        "1",
        "CPU",
        "in",
        "about",
        "60",
        "min",
        "n1",
        "GPU",
        "0-3",
    ] in words
    assert "under fcfs" in lines
    assert "  job 8 does not start now, as it would on n1 GPU 2,3" in lines
    after = lines[lines.index("under fcfs+easy") + 1]
    assert after == "  the same starts, places and reservations"
    code, shown = typed(monkeypatch, capsys, file, "--job", "7_1", "--policy", "fcfs+greedy")
    assert code == 0
    assert "job 7_1 under the recorded settings\n" in shown.out
    assert "  waits (" in shown.out
    assert "job 7_1 under fcfs+greedy\n" in shown.out
    assert "  starts now on n1 GPU " in shown.out


def test_the_json_output_is_complete(file, monkeypatch, capsys):
    code, shown = typed(monkeypatch, capsys, file, "--policy", "fcfs", "--json")
    made = json.loads(shown.out)
    assert (code, made["schema_version"], made["file"]["waiting"], made["notes"]) == (0, 1, 5, [])
    assert [one["job"] for one in made["plan"]["starts"]] == ["6", "8"]
    (other,) = made["others"]
    assert (other["policy"], other["starts"]) == ("fcfs", [])
    assert [one["job"] for one in other["changes"]["start_no_more"]] == ["6", "8"]
    code, shown = typed(monkeypatch, capsys, file, "--job", "5", "--json")
    made = json.loads(shown.out)
    assert (made["plan"]["job"]["reason"], made["others"]) == ("Resources", [])


def test_the_shell_output_is_parseable(file, monkeypatch, capsys):
    assert typed(monkeypatch, capsys, file, "-q")[1].out == "6\n8\n"
    assert typed(monkeypatch, capsys, file, "-q", "--policy", "fcfs")[1].out == ""
    assert typed(monkeypatch, capsys, file, "-q", "--job", "5")[1].out == "Resources\n"
    assert typed(monkeypatch, capsys, file, "-q", "--job", "6")[1].out == "starts\n"


def test_other_settings_come_from_a_file(file, tmp_path, monkeypatch, capsys):
    config = tmp_path / "other.toml"
    config.write_text('[priority]\norder = "fifo"\nbackfill = false\n')
    code, shown = typed(monkeypatch, capsys, file, "--config", config)
    assert code == 0
    assert "under default\n  job 6 does not start now" in shown.out
    code, shown = typed(monkeypatch, capsys, file, "--config", config, "--policy", "default,fcfs+greedy", "--json")
    assert [[start["job"] for start in other["starts"]] for other in json.loads(shown.out)["others"]] == [
        [],
        ["6", "7_1", "9"],
    ]
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.toml").write_text('[priority]\nbackfill_depth = 0\norder = "fifo"\n')
    monkeypatch.setenv("GPUSCHED_HOME", str(home))
    assert typed(monkeypatch, capsys, file, "--policy", "present", "-q")[1].out == "6\n7_1\n9\n"


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["nowhere.json"], 1, "there is no snapshot nowhere.json"),
        (["/"], 1, "/ is a folder, not a snapshot"),
        (["FILE", "--job", "99"], 1, "job 99 is neither running nor pending in this snapshot"),
        (["FILE", "--policy", "lifo"], 2, "'lifo' names no known order"),
        (["FILE", "--policy", "fcfs,sjf", "-q"], 2, "--quiet takes a single policy"),
        (["FILE", "-q", "--json"], 2, "--quiet and --json cannot be combined"),
        (["FILE", "--config", "nowhere.toml"], 1, "there is no config file nowhere.toml"),
        (["FILE", "--config", "x.toml", "--policy", "sjf"], 2, "no policy uses x.toml"),
    ],
)
def test_a_mistake_is_one_sentence_and_a_hint(file, monkeypatch, capsys, words, code, text):
    found, shown = typed(monkeypatch, capsys, *(str(file) if word == "FILE" else word for word in words))
    assert found == code
    if "--json" in words:
        assert text in json.loads(shown.err)["error"]["message"]
        return
    error, hint = shown.err.splitlines()
    assert text in error
    assert hint.startswith("gpusched: hint: ")
    assert shown.out == ""


def test_an_impossible_setting_is_refused(file, monkeypatch, capsys):
    document = json.loads(file.read_text())
    document["settings"]["priority"]["half_life_s"] = 0
    file.write_text(json.dumps(document))
    code, shown = typed(monkeypatch, capsys, file)
    assert code == 1
    assert "settings.priority.half_life_s is 0.0, not a number above 0" in shown.err
