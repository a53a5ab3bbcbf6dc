"""Events, facts and examples of alerts, as the documentation has them and as the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpusched.addons.notify.targets import Targets, read_targets
from gpusched.cli.job_options import gsub_table
from gpusched.model.alert_events import ADMIN_EVENTS, EVENTS, FACTS, OWNER_EVENTS

DOCS = Path(__file__).resolve().parents[2] / "docs"


def table(title: str) -> dict[str, str]:
    page = (DOCS / "reference" / "alerts.md").read_text(encoding="utf-8")
    section = page.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", section, re.M))


@pytest.mark.parametrize(
    ("title", "known"),
    [
        ("Events", EVENTS),
        ("Events for owners of other processes", OWNER_EVENTS),
        ("Events for the administrator", ADMIN_EVENTS),
        ("Facts", FACTS),
    ],
)
def test_the_tables_match_the_code(title: str, known: dict[str, str]) -> None:
    assert table(title) == dict(known)


def test_options_offer_every_event() -> None:
    notify = next(option for option in gsub_table().options if "--notify" in option.names)
    assert notify.completes == " ".join([*EVENTS, "all"])
    assert ", ".join(EVENTS) in notify.help


BLOCKS = re.findall(
    r"```toml\n(# notify.toml\n.*?)```", (DOCS / "howto" / "alerts.md").read_text(encoding="utf-8"), re.S
)


@pytest.mark.parametrize("block", BLOCKS)
def test_every_example_of_a_notify_file_is_valid(block: str, tmp_path: Path) -> None:
    file = tmp_path / "notify.toml"
    file.write_text(block, encoding="utf-8")
    assert read_targets(str(file)) != Targets(str(file))


def test_there_are_examples() -> None:
    assert len(BLOCKS) == 2
