"""A command, option, setting, state, reason, refusal or route that is not documented fails here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from gpusched.api.routes import ROUTES
from gpusched.cli.admin.app import app
from gpusched.config import SETTINGS, TABLE_SETTINGS, load_settings, problems_in
from gpusched.config.schema import SECTIONS
from gpusched.model.settings import Settings
from gpusched.model.states import JobState, ReasonCode
from tools.reference import pages

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def test_generated_pages_are_current() -> None:
    for name, page in pages().items():
        found = (DOCS / "reference" / name).read_text(encoding="utf-8")
        assert found == page, f"docs/reference/{name} is stale; run: python -m tools.reference"


def test_every_setting_has_a_meaning() -> None:
    page = (DOCS / "reference" / "settings.md").read_text()
    tables = [one for table in TABLE_SETTINGS.values() for one in table.values()]
    assert len(tables) > 30
    for one in (*SETTINGS.values(), *tables):
        assert f"| `{one.key}` |" in page
    for section in SECTIONS:
        assert f"## [{section}" in page


def test_every_state_is_explained_with_its_short_form() -> None:
    rows = (DOCS / "reference" / "states.md").read_text()
    for state in JobState:
        assert re.search(rf"^\| {state.value} \| {state.compact} \| (yes|no) \| \S", rows, re.M), state


def test_every_reason_is_explained() -> None:
    rows = (DOCS / "reference" / "states.md").read_text()
    for reason in ReasonCode:
        assert re.search(rf"^\| {reason.value} \| \S", rows, re.M), reason


def test_every_documented_state_and_reason_exists() -> None:
    rows = re.findall(r"^\| ([A-Za-z_]+) \|", (DOCS / "reference" / "states.md").read_text(), re.M)
    known = {state.value for state in JobState} | {reason.value for reason in ReasonCode} | {"state", "reason"}
    assert set(rows) <= known


def test_every_route_says_what_it_does() -> None:
    for route in ROUTES:
        assert len(route.summary) > 10


def test_links_between_pages_resolve() -> None:
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} -> {target}"


COMMAND = re.compile(r"(?:(?<=`)|(?<=^    )|(?<=^\$ ))(?:sudo )?(?:/\S+/)?gpusched((?: [a-z][a-z-]*)+)", re.M)


def test_every_command_of_the_pages_exists() -> None:
    unknown = set()
    every = get_command(app)
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        for words in COMMAND.findall(page.read_text()):
            command = every
            for word in words.split():
                commands = getattr(command, "commands", {})
                if commands and word not in commands:
                    unknown.add(f"{page.relative_to(ROOT)}: gpusched{words}")
                command = commands.get(word)
    # Output of other commands begins alike.
    assert unknown - {"docs/howto/foreign-processes.md: gpusched on n"} == set()


def test_the_readme_has_exactly_two_set_up_commands() -> None:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) == 2
    assert all(len(block.strip().splitlines()) == 1 for block in blocks)


def test_every_decision_has_a_summary_and_rejected_alternatives() -> None:
    for page in (DOCS / "decisions").glob("*.md"):
        text = page.read_text()
        assert "**Summary.**" in text, page.name
        assert "**Tests.**" in text, page.name


def test_decisions_are_numbered_once_and_the_links_to_them_agree() -> None:
    names = sorted(page.name for page in (DOCS / "decisions").glob("*.md"))
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))
    for name in names:
        assert (DOCS / "decisions" / name).read_text(encoding="utf-8").startswith(f"# {int(name[:4])}. "), name
    for page in DOCS.rglob("*.md"):
        for number, name in re.findall(r"\[decision (\d+)\]\([^)]*?([^/)]+\.md)", page.read_text(encoding="utf-8")):
            assert int(number) == int(name[:4]), f"{page.relative_to(ROOT)}: decision {number} is {name}"


def toml_blocks() -> list[tuple[str, str]]:
    """Every example of a config file in the documentation."""
    pages = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    return [
        (f"{page.relative_to(ROOT)}-{number}", block)
        for page in pages
        for number, block in enumerate(re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.S))
        if not block.startswith("# notify.toml")
    ]


@pytest.mark.parametrize("block", [text for _, text in toml_blocks()], ids=[name for name, _ in toml_blocks()])
def test_every_example_of_a_config_file_is_valid(block: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(block, encoding="utf-8")
    assert problems_in(str(path), {}) == []
    assert load_settings(str(path), {}).settings != Settings()


def test_settings_that_need_a_restart_are_listed() -> None:
    page = (DOCS / "howto" / "change-settings.md").read_text()
    assert [path for path, known in SETTINGS.items() if known.needs_restart and f"`{path}`" not in page] == []
