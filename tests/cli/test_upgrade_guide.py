"""The page on upgrades: the versions that it names, and its commands, with pip left out."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path

from shell import Shell

from gpusched.engine.remote.messages import WIRE_VERSION
from gpusched.store.schema import MIGRATIONS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "upgrade.md"


def commands(title: str) -> list[list[str]]:
    """The words of each command of the block below a title."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"```bash\n(.*?)```", section, re.S)
    lines = [line.split() for line in block.splitlines()]
    assert [line[0] for line in lines].count("pip") == 1
    return lines


def test_the_page_names_the_versions_of_this_release() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"wire version \*\*(\d+)\*\*", text) == [str(WIRE_VERSION)]
    rows = re.findall(r"^\| (\d+) \| \S", text, re.M)
    assert rows == [str(number) for number in range(1, len(MIGRATIONS) + 1)]
    assert len(set(re.findall(r"^\| \d+ \| (.+) \|$", text, re.M))) == len(rows)


def test_an_upgrade_and_the_way_back_with_the_backup_keep_jobs(own: Shell) -> None:
    running = own.submit("-o", "run.out", "--wrap", "while [ ! -e stop ]; do sleep 0.1; done")
    held = own.submit("--hold", "--", "true")
    for word, *rest in commands("A personal scheduler"):
        if word != "pip":
            own.ok(word, *rest)
    assert own.ok("gq", "--noheader", "-o", "%i %T", "-j", held).split() == [held, "PENDING"]

    # A newer release has migrated the table.
    own.ok("gpusched", "daemon", "stop")
    with closing(sqlite3.connect(own.home / "gpusched.db")) as table:
        table.execute("PRAGMA user_version = 999")
    refused = own.type("gpusched", "daemon", "start")
    assert refused.code != 0
    assert "schema version 999" in refused.err
    for word, *rest in commands("Go back"):
        if word != "pip" and rest[1:] != ["stop"]:
            own.ok(word, *rest)
    assert own.ok("gq", "--noheader", "-o", "%i %T", "-j", held).split() == [held, "PENDING"]
    (own.work / "stop").touch()
    assert own.type("gwait", "--timeout", "60s", running).code == 0, "it ran through both"
