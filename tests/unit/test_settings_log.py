"""The record of settings: the sum of its lines is what was known last, whatever happened to the file or the daemon."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpusched.config.document import Difference, differences, document_of, look_up, with_differences
from gpusched.config.load import settings_in
from gpusched.daemon import settings_log
from gpusched.daemon.settings_log import SettingsLog
from gpusched.model.commands import Caller
from gpusched.model.settings import Settings

ANN = Caller(1000, "ann")
TEXTS = [
    "",
    "[account.vision]\nshares = 4\n",
    "[account.vision]\nshares = 6\nusers = ['ann']\n[queue.default]\nmax_gpus = 2\n",
    "[account.vision]\nshares = 6\nusers = {ann = 1}\n[license]\nmatlab = 3\n[gpu]\nids = 'uuid'\n",
    "[priority]\npreset = 'slurm'\nhalf_life_s = 60\n",
    "[priority]\npreset = 'slurm'\n[account.vision]\n",
]


def settings(text: str) -> Settings:
    return settings_in(text, "config.toml")


def opened(path: Path) -> SettingsLog:
    return SettingsLog(str(path), lambda: 100.0)


@pytest.mark.parametrize("before", TEXTS)
@pytest.mark.parametrize("after", TEXTS)
def test_differences_lead_from_one_document_to_the_other(before: str, after: str) -> None:
    one, other = document_of(settings(before)), document_of(settings(after))
    found = differences(one, other)
    assert with_differences(one, found) == other
    assert bool(found) == (one != other)
    back = [Difference(each.key, each.after, each.before) for each in reversed(found)]
    assert with_differences(other, back) == one
    assert all(look_up(other, each.key) == each.after for each in found)


def test_document_has_what_the_file_states_and_no_defaults() -> None:
    assert document_of(settings(TEXTS[0])) == {}
    assert document_of(settings("[account.vision]\nshares = 1\n")) == {"account": {"vision": {}}}
    wanted = {"account": {"vision": {"shares": 6, "users": {"ann": 1}}}, "queue": {"default": {"max_gpus": 2}}}
    assert document_of(settings(TEXTS[2])) == wanted
    # The preset's own values are not the file's.
    assert document_of(settings(TEXTS[4])) == {"priority": {"preset": "slurm", "half_life_s": 60}}


def test_each_change_is_recorded_once_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "settings.jsonl"
    for text in TEXTS:
        for _ in range(2):
            opened(path).record(settings(text), ANN, "gctl reload")
    entries = opened(path).entries(0.0, 100)
    assert [entry["id"] for entry in entries] == [1, 2, 3, 4, 5]
    assert entries[0] == {
        "id": 1,
        "at": 100.0,
        "uid": 1000,
        "user": "ann",
        "what": "gctl reload",
        "changes": [{"key": ["account", "vision"], "before": None, "after": {"shares": 4}}],
    }
    assert opened(path).entries(100.5, 100) == []
    assert [entry["id"] for entry in opened(path).entries(0.0, 2)] == [4, 5]
    assert path.stat().st_mode & 0o777 == 0o600


def test_line_cut_short_is_not_counted_and_its_change_is_recorded_again(tmp_path: Path) -> None:
    path = tmp_path / "settings.jsonl"
    opened(path).record(settings(TEXTS[0]), ANN, "start")
    opened(path).record(settings(TEXTS[1]), ANN, "one")
    whole = path.read_bytes()
    opened(path).record(settings(TEXTS[2]), ANN, "two")
    complete = path.read_bytes()
    for cut in range(len(whole), len(complete)):
        path.write_bytes(complete[:cut])
        opened(path).record(settings(TEXTS[2]), ANN, "two")
        assert path.read_bytes() == complete


def test_write_that_fails_leaves_the_record_and_the_next_has_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "settings.jsonl"
    log = opened(path)
    log.record(settings(TEXTS[0]), ANN, "start")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(settings_log.os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            log.record(settings(TEXTS[1]), ANN, "one")
    log.record(settings(TEXTS[2]), ANN, "two")
    (entry,) = opened(path).entries(0.0, 9)
    assert (entry["id"], entry["what"], len(entry["changes"])) == (1, "two", 2)


@pytest.mark.parametrize("content", [b"nonsense\n", b"[]\n", b'{"id": 0}\n', b'{"document": {}}\n{"id": 1}\n'])
def test_damaged_record_is_set_aside(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "settings.jsonl"
    path.write_bytes(content)
    log = opened(path)
    log.record(settings(TEXTS[1]), ANN, "start")
    assert (tmp_path / "settings.jsonl.damaged").read_bytes() == content
    assert opened(path).entries(0.0, 9) == []


def test_long_record_keeps_its_newest_changes_and_their_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "settings.jsonl"
    log = opened(path)
    for number in range(20):
        log.record(settings(TEXTS[number % 3]), ANN, f"number {number}")
    monkeypatch.setattr(settings_log, "_MOST_BYTES", 100)
    monkeypatch.setattr(settings_log, "_KEPT", 3)
    assert [entry["id"] for entry in opened(path).entries(0.0, 99)] == [17, 18, 19]
    before = path.read_bytes()
    opened(path).record(settings(TEXTS[19 % 3]), ANN, "the same")
    assert path.read_bytes() == before
    assert len([json.loads(line) for line in before.splitlines()]) == 4


def test_settings_of_any_instant_since_the_record_began(tmp_path: Path) -> None:
    now = [100.0]
    path = tmp_path / "settings.jsonl"
    log = SettingsLog(str(path), lambda: now[0])
    texts = [
        "[account.a]\ngpu_hours = 1\n",
        "[account.a]\ngpu_hours = 2\n[account.b]\n",
        "[budget]\nweights = {A100 = 2}\n",
    ]
    for text in texts:
        log.record(settings(text), Caller(0, "root"), "edit")
        now[0] += 100
    for one in (log, SettingsLog(str(path), lambda: now[0])):
        assert one.document_before(100) is None
        for at, text in ((101, texts[0]), (200, texts[0]), (201, texts[1]), (300, texts[1]), (301, texts[2])):
            assert one.document_before(at) == document_of(settings(text)), at


def test_settings_before_a_record_of_an_older_version_are_not_known(tmp_path: Path) -> None:
    path = tmp_path / "settings.jsonl"
    change = {"id": 1, "at": 200, "changes": [{"key": ["budget", "weights"], "before": None, "after": {"T4": 2}}]}
    path.write_text(json.dumps({"id": 0, "document": {}}) + "\n" + json.dumps(change) + "\n")
    log = opened(path)
    assert log.document_before(200) is None
    assert log.document_before(201) == {"budget": {"weights": {"T4": 2}}}
