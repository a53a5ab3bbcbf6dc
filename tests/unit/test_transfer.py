"""Export and import of accounts, queues, QOS and limits: what is printed, and that an import is all or nothing."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from gpusched.cli import transfer
from gpusched.config.document import document_of
from gpusched.config.load import parse_text, settings_in
from gpusched.errors import GpuschedError, Refused, UsageError

CONFIG = """# Ours.
[gpu]
ids = "uuid"

[account.science]          # all of us
gpu_hours = 100
[account.vision]
parent = "science"
users = ["ann", "bob"]     # since May
[account."it's"]
users = { "cleo" = 3, "dan" = 1 }

[queue.default]
[queue.big]
max_gpus = 4
[qos.night]
tier = -1
[user.bob]
max_jobs = 2
message = "a \\"quote\\""
"""
LIMIT = {"user": "bob", "account": "vision", "max_gpus": 1.0, "max_jobs": None, "until_at": None}


class Client:
    """A daemon that reads the file when told to, and refuses what it is told to refuse."""

    def __init__(self, config: Path) -> None:
        self.config = config
        self.jobs: list[list[Any]] = []
        self.vision = ["ann", "bob"]
        self.reloads = 0
        self.refusal: GpuschedError | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        if path == "/v1/status":
            return {"daemon": {"config": str(self.config)}}
        if path == "/v1/accounts":
            return {"accounts": [{"account": "vision", "user": None, "users": self.vision}]}
        if path == "/v1/limits":
            made = {**LIMIT, "message": "it's full", "set_by": "carla"}
            return {"limits": [made, {**LIMIT, "message": "", "set_by": None}]}
        if path.startswith("/v1/jobs?"):
            return {"rows": self.jobs}
        if path.startswith("/v1/usage?"):
            return {"usage": []}
        assert (method, path) == ("POST", "/v1/reload")
        self.reloads += 1
        if self.refusal is not None:
            raise self.refusal
        return {"changed": ["account.vision"]}


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    made = Client(tmp_path / "config.toml")
    made.config.write_text(CONFIG)
    monkeypatch.setattr(transfer, "connect", lambda: made)
    return made


def imported(text: str, monkeypatch: pytest.MonkeyPatch, **values: Any) -> int:
    monkeypatch.setattr(
        sys, "stdin", type("In", (), {"buffer": io.BytesIO(text.encode()), "isatty": lambda _: False})()
    )
    return transfer.import_from("import", ["-"], values)


def tables(text: str) -> dict[str, Any]:
    document = document_of(settings_in(text, "config.toml"))
    return {section: document.get(section) for section in transfer.SECTIONS}


def test_export_is_readable_and_imports_as_what_it_was(
    client: Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer.export("export", [], {})
    text = capsys.readouterr().out
    assert tables(text) == tables(CONFIG)
    assert "gpu" not in parse_text(text)
    assert 'users = ["ann", "bob"]' in text
    assert """#     gctl limit user bob max_gpus=1 account=vision -m 'it'"'"'s full'""" in text
    # Into an empty file, too. Its accounts do not list the one who runs this test.
    client.config.write_text("")
    assert imported(text, monkeypatch, yes=True) == 0
    assert tables(client.config.read_text()) == tables(CONFIG)


def test_export_has_the_members_that_coordinators_added(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    client.vision = ["ann", "dora"]
    transfer.export("export", [], {})
    assert parse_text(capsys.readouterr().out)["account"]["vision"]["users"] == ["ann", "dora"]


def test_import_makes_its_sections_equal_and_leaves_the_others_and_the_comments(
    client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = '[account.vision]\nusers = ["ann"]\n[account.new]\nusers = "*"\n[user.eve]\nmax_gpus = 1\n'
    assert imported(wanted, monkeypatch, dry_run=True) == 0
    shown = capsys.readouterr().out
    assert '-users = ["ann", "bob"]     # since May' in shown
    assert client.config.read_text() == CONFIG
    assert client.reloads == 0
    assert imported(wanted, monkeypatch) == 0
    after = client.config.read_text()
    found = parse_text(after)
    assert {section: found[section] for section in ("account", "user")} == parse_text(wanted)
    assert found["queue"] == parse_text(CONFIG)["queue"]
    assert after.startswith("# Ours.")
    assert "# since May" in after


def test_import_that_is_refused_leaves_the_file_as_it_was(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.jobs = [["41", "PENDING", "big"]]
    with pytest.raises(Refused, match="queue big has unfinished jobs: 41"):
        imported("[queue.default]\n", monkeypatch)
    client.jobs = []
    with pytest.raises(UsageError, match="account vision is below nowhere"):
        imported('[account.vision]\nparent = "nowhere"\nusers = ["ann"]\n', monkeypatch)
    client.refusal = Refused("the machines have less than was promised", "promise less")
    with pytest.raises(Refused, match="is as it was"):
        imported("[queue.default]\n[queue.big]\nmax_gpus = 5\n", monkeypatch)
    assert client.config.read_text() == CONFIG


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[gpu]\nids = 'index'\n", r"has \[gpu\]"),
        ("account = 3\n", r"has \[account\]"),
        ("a =\n", "is not TOML"),
        ("", "has nothing to import"),
        ("[account]\n", "has nothing to import"),
    ],
)
def test_import_says_what_is_wrong_with_the_file(
    text: str, said: str, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(GpuschedError, match=said):
        imported(text, monkeypatch)
    assert client.reloads == 0


def test_import_needs_one_file_that_can_be_read(tmp_path: Path) -> None:
    for words in ([], ["a", "b"], [str(tmp_path)], [str(tmp_path / "none")]):
        with pytest.raises(GpuschedError):
            transfer.import_from("import", words, {})
    (tmp_path / "bytes").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="not UTF-8"):
        transfer.import_from("import", [str(tmp_path / "bytes")], {})
