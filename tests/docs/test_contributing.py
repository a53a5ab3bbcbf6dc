"""The contributing page answers a newcomer's questions with files that exist and say what it claims."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")


def answers() -> dict[str, list[tuple[str, list[str]]]]:
    """Question -> the files to open, each with the names to look for in it."""
    section = PAGE.partition("## Where is it?")[2].partition("\n## ")[0]
    found = {}
    for question, answer in re.findall(r"^\| ([^|]+\?) \| ([^|]+) \|$", section, re.M):
        parts = re.findall(r"`([\w/]+\.(?:py|md))`((?: *\(?(?:`\w+`(?:, | and )?)+\)?)?)", answer)
        found[question] = [(path, re.findall(r"`(\w+)`", names)) for path, names in parts]
    return found


ANSWERS = answers()


def test_the_seven_questions_are_answered() -> None:
    words = ("backfill", "killed", "busy", "placement strategy", "gsub option", "limit", "column")
    assert len(ANSWERS) >= len(words)
    for word in words:
        assert any(word in question for question in ANSWERS), word


@pytest.mark.parametrize("question", ANSWERS)
def test_an_answer_opens_at_most_three_files_which_have_what_it_names(question: str) -> None:
    files = ANSWERS[question]
    assert 1 <= len(files) <= 3
    for path, names in files:
        text = (ROOT / path).read_text(encoding="utf-8")
        assert names, f"say what to look for in {path}"
        for name in names:
            defined = rf"^\s*(?:async )?(?:def|class) {name}\b|^\s*{name}(?::[^=]+)? ="
            assert re.search(defined, text, re.M), f"{path}: {name}"
