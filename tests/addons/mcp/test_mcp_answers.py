"""Answers of `gpusched mcp`: hostile text, limits, schemas, what is announced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.addons.mcp import answers, tools
from gpusched.addons.mcp.answers import MOST_BYTES, clean, cleaned, fit, size_of
from gpusched.addons.mcp.tools import ALLOWANCES, TOOLS, offered, run_tool
from gpusched.errors import DaemonUnreachable, Forbidden, NotFound, UsageError

NOTHING: frozenset[str] = frozenset()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\n\ttext", "plain\n\ttext"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07x", "x"),
        ("10%\r50%\r100%\r\nnext", "100%\nnext"),
        ("a\u202egpj.exe\u202c\u200bz", "agpj.exez"),
        ("bell\x07 null\x00 c1\x9b", "bell null c1"),
        ("\udcff lone", " lone"),
        ("non\u00a0breaking\u2028line", "non breaking line"),
    ],
)
def test_text_of_others_loses_what_is_not_text(text: str, shown: str) -> None:
    assert clean(text) == shown


@given(st.text(st.characters(), max_size=60))
def test_cleaned_text_is_printable_and_can_be_sent(text: str) -> None:
    found = cleaned(text)
    assert all(char.isprintable() for char in found.replace("\t", ""))
    found.encode()


def test_documents_are_cleaned_to_their_leaves() -> None:
    document = {
        "a": {"b\x1b[1m": ["x\ny", None, {"start_at": 0, "gone": None, "at": 1.5}]},
        "is_at": True,
        "n": "é" * 2000,
    }
    found = cleaned(document)
    assert found["a"] == {"b": ["x y", None, {"start_at": "1970-01-01T00:00:00Z", "at": "1970-01-01T00:00:01Z"}]}
    assert len(found["n"]) == 1000


@given(st.lists(st.text(max_size=2000), max_size=200), st.booleans())
def test_answers_fit(items: list[str], keeps_end: bool) -> None:
    items = [f"{number} {item}" * 3 for number, item in enumerate(items)]
    document: dict[str, Any] = {"items": list(items), "more": "x" * 100}
    dropped = fit(document, "items", keeps_end=keeps_end)
    assert size_of(document) <= MOST_BYTES
    assert document["items"] == (items[dropped:] if keeps_end else items[: len(items) - dropped])


def test_a_single_long_text_keeps_its_end() -> None:
    document = {"text": '"\n' * 100_000 + "end"}
    assert fit(document, "text", keeps_end=True)
    assert document["text"].endswith("end")
    assert MOST_BYTES // 2 < size_of(document) <= MOST_BYTES


def test_no_declared_key_is_about_environments() -> None:
    """An answer has declared keys only, so this is all that could tell one."""
    names = {
        field.name
        for kind in vars(answers).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
        for field in msgspec.structs.fields(kind)
    }
    assert not {name for name in names if "env" in name or "spec" in name}
    secret = {
        "id": "1",
        "name": "n",
        "user": "u",
        "state": "RUNNING",
        "env": {"TOKEN": "s3cret"},
        "spec": {"x": "s3cret"},
    }
    assert "s3cret" not in json.dumps(answers.plain(answers.read(answers.JobAnswer, secret)))


def test_only_what_changes_nothing_is_offered_without_leave() -> None:
    assert [tool.name for tool in offered(NOTHING)] == [
        *("list_jobs", "history", "show_job", "why", "cluster", "usage", "logs", "submit")
    ]
    assert [tool.name for tool in offered(frozenset(ALLOWANCES))] == list(TOOLS)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("nothing", {}, "there is no tool 'nothing'"),
        ("cancel", {"ids": [1]}, "this server does not cancel jobs"),
        ("hold", {"ids": [1]}, "this server does not hold jobs"),
        ("submit", {"key": "k", "gpus": 1, "time": "1h", "command": ["x"], "dry_run": False}, "does not submit jobs"),
        ("submit", {"gpus": 1, "time": "1h", "command": ["x"]}, "missing required field `key`"),
        ("submit", {"key": "k", "gpus": 1, "time": "1h", "command": ["x"], "gpu": 2}, "unknown field `gpu`"),
        ("submit", {"key": "k", "gpus": -1, "time": "1h", "command": ["x"]}, "expected `int` >= 0 - at `$.gpus`"),
        ("submit", {"key": "k", "gpus": 1, "time": "1h"}, "give either a command or a script"),
        ("submit", {"key": "k", "gpus": 1, "time": "1h", "command": ["x"], "script": "y"}, "give either"),
        ("submit", {"key": "k", "gpus": 1, "time": "soon", "command": ["x"]}, "'soon' is not a time"),
        (
            "submit",
            {"key": "k", "gpus": 1, "time": "1h", "command": ["x"], "chdir": "here"},
            "expected an absolute path",
        ),
        ("list_jobs", {"limit": 101}, "expected `int` <= 100 - at `$.limit`"),
        ("list_jobs", {"state": "LOST"}, "invalid enum value 'LOST' - at `$.state`"),
        ("list_jobs", {"user": 'x" user:"y'}, "is not a name"),
        ("list_jobs", {"cursor": "-1"}, "cursor '-1' is not from an earlier answer"),
        ("history", {"cursor": "7"}, "cursor '7' is not from an earlier answer"),
        ("history", {"since": "ages"}, "'ages' is not an instant"),
        ("show_job", {"id": "1/../2"}, "expected an id as 42 or 42_7 - at `$.id`"),
        ("logs", {"id": 1, "lines": 501}, "expected `int` <= 500"),
        ("show_job", {"id": "@"}, "expected an id"),
    ],
)
def test_mistakes_of_an_agent_are_one_sentence(name: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((UsageError, Forbidden)) as caught:
        run_tool(name, arguments, NOTHING)
    assert words in caught.value.message
    assert caught.value.hint
    assert "\n" not in caught.value.message


def test_cancel_takes_few_ids() -> None:
    with pytest.raises(UsageError, match="length <= 20"):
        run_tool("cancel", {"ids": list(range(1, 22))}, frozenset(ALLOWANCES))


def test_a_daemon_that_is_away_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSCHED_SOCKET", str(tmp_path / "api.sock"))
    with pytest.raises(DaemonUnreachable, match="no daemon answers on"):
        run_tool("list_jobs", {}, NOTHING)


def test_a_refusal_of_one_job_keeps_no_other_from_being_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(method: str, path: str, body: Any = None) -> dict[str, Any]:
        job_id = body["ids"][0]
        if job_id == "2":
            raise NotFound("there is no job 2", "list the jobs with: gq -a")
        if job_id == "4":
            raise DaemonUnreachable("no daemon answers", "start it")
        return {"cancelled": [job_id] if job_id != "3" else []}

    monkeypatch.setattr(tools, "ask", ask)
    found = run_tool("cancel", {"ids": [1, 2, "3", 4, 5]}, frozenset(ALLOWANCES))
    assert found["done"] == ["1"]
    assert [one["id"] for one in found["refused"]] == ["2", "3", "4", "5"]
    assert found["refused"][0]["reason"] == "there is no job 2; list the jobs with: gq -a"
    with pytest.raises(DaemonUnreachable):
        run_tool("cancel", {"ids": [4, 5]}, frozenset(ALLOWANCES))


def test_the_history_goes_on_where_it_was_while_jobs_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = [str(number) for number in range(1, 31)]

    def ask(method: str, path: str, body: Any = None) -> dict[str, Any]:
        limit = int(path.rpartition("limit=")[2])
        return {
            "fields": ["id", "name", "user", "state"],
            "rows": [[one, "n", "u", "FAILED"] for one in ended[-limit:]],
        }

    monkeypatch.setattr(tools, "ask", ask)
    seen, cursor = [], None
    for page in range(100):
        found = run_tool("history", {"limit": 7, **({"cursor": cursor} if cursor else {})}, NOTHING)
        seen += [job["id"] for job in found["jobs"]]
        cursor = found.get("next")
        if cursor is None:
            break
        ended += [str(1000 + 300 * page + more) for more in range(300)]
    assert seen == [str(number) for number in range(30, 0, -1)]


def test_schemas_are_objects_and_sound() -> None:
    pytest.importorskip("mcp", reason="the SDK of MCP is not installed: pip install '.[mcp]'")
    from gpusched.addons.mcp.server import build, schema_of

    for tool in TOOLS.values():
        for kind in (tool.arguments, tool.answer):
            schema = schema_of(kind)
            assert schema["type"] == "object", kind
            jsonschema.Draft202012Validator.check_schema(schema)
        assert tool.arguments.__doc__
    build(frozenset(ALLOWANCES))
