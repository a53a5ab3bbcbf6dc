"""Templates of gsub and saved views of gq: what takes precedence, whom they are read from, what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gpusched import paths
from gpusched.cli import gsub, views
from gpusched.cli import help as help_module
from gpusched.cli.job_options import gsub_table
from gpusched.cli.options import gq_table
from gpusched.cli.parse import parse, split_words
from gpusched.cli.saved_options import templates
from gpusched.cli.templates import filled, print_list
from gpusched.errors import GpuschedError, Refused, UsageError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with templates of the user, and a folder `site` with those of the site."""
    monkeypatch.setenv("GPUSCHED_HOME", str(tmp_path / "home"))
    (tmp_path / "site").mkdir()
    (tmp_path / "home" / "templates").mkdir(parents=True)
    monkeypatch.setattr(paths, "site_templates", lambda: str(tmp_path / "site"))
    for name in [key for key in os.environ if key.startswith("GSUB_")]:
        monkeypatch.delenv(name)
    return tmp_path


def own(home: Path, name: str, text: str) -> None:
    (home / "home" / "templates" / name).write_text(text)


def of_site(home: Path, name: str, text: str) -> Path:
    path = home / "site" / name
    path.write_text(text)
    return path


def given(line: str) -> dict[str, Any]:
    return parse(gsub_table(), split_words(line))[0]


def values(line: str) -> dict[str, Any]:
    found = filled(gsub_table(), given(line))
    return {key: found.get(key) for key in ("gpus", "time_limit_s", "name", "extra_env") if key in found}


PRECEDENCE = {
    "the template alone": ("--template big", {"gpus": 4, "time_limit_s": 86400}),
    "the command line over it": ("--template big -g 1", {"gpus": 1, "time_limit_s": 86400}),
    "before it as well": ("-t 1h --template big", {"gpus": 4, "time_limit_s": 3600}),
    "the last of several": ("--template big,named", {"gpus": 2, "time_limit_s": 86400, "name": "x"}),
    "given twice": ("--template named --template big", {"gpus": 4, "time_limit_s": 86400, "name": "x"}),
    "variables are joined": ("--template env -E B=3", {"extra_env": {"A": "1", "B": "3"}}),
    "the user's own hides the site's": ("--template both", {"gpus": 1}),
}


@pytest.mark.skipif(os.geteuid() != 0, reason="templates of the site are root's")
@pytest.mark.parametrize("case", PRECEDENCE)
def test_what_the_command_line_says_wins_over_templates(home: Path, case: str) -> None:
    of_site(home, "big", "#!/bin/sh\n# for a day\n\n#GSUB -g 4\n#GSUB -t 1d\n")
    of_site(home, "both", "#GSUB -g 3\n")
    own(home, "both", "#GSUB -g 1\n")
    own(home, "named", "#GSUB -g 2 -J x # two\n")
    own(home, "env", "#GSUB -E A=1 -E B=2\n")
    line, expected = PRECEDENCE[case]
    assert values(line) == expected


def test_a_template_of_a_script_is_below_its_own_lines_and_one_that_is_typed_above_them(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own(home, "one", "#GSUB -g 1 -t 1h -J one\n")
    own(home, "two", "#GSUB -g 2\n")
    script = home / "s.sh"
    script.write_text("#!/bin/sh\n#GSUB --template one\n#GSUB -t 2h\ntrue\n")

    def read(line: str) -> dict[str, Any]:
        typed = filled(gsub_table(), given(line))
        found = gsub._what(gsub_table(), typed, [], [str(script)], False)["values"]
        return {key: found[key] for key in ("gpus", "time_limit_s", "name")}

    assert read("") == {"gpus": 1, "time_limit_s": 7200, "name": "one"}
    assert read("--template two") == {"gpus": 2, "time_limit_s": 7200, "name": "one"}
    monkeypatch.setenv("GSUB_TEMPLATE", "two")
    assert read("-t 3h") == {"gpus": 2, "time_limit_s": 10800, "name": "one"}


REFUSED = {
    "unknown": ("bigg", "there is no template 'bigg'", "did you mean big?"),
    "no option": ("plain", "line 1: a template holds only #GSUB lines and comments", "#GSUB -g 1 -t 4h"),
    "wrong option": ("wrong", "line 2: unknown option '--gg'", "gsub --help"),
    "only typed": ("typed", "line 1: --wrap makes no sense in a script", "on the command line"),
    "nested": ("nested", "the template nested names another one, big", "--template A,B"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_template_is_refused_with_its_line(home: Path, case: str) -> None:
    own(home, "big", "#GSUB -g 4\n")
    own(home, "plain", "-g 4\n")
    own(home, "wrong", "#GSUB -g 4\n#GSUB --gg 4\n")
    own(home, "typed", "#GSUB --wrap x\n")
    own(home, "nested", "#GSUB --template big\n")
    name, message, hint = REFUSED[case]
    with pytest.raises(UsageError) as raised:
        values(f"--template {name}")
    assert message in raised.value.message
    assert hint in raised.value.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="changes an owner")
@pytest.mark.parametrize("what", ["file mode", "file owner", "folder mode"])
def test_a_template_of_the_site_that_a_user_could_write_is_refused(home: Path, what: str) -> None:
    path = of_site(home, "big", "#GSUB -g 4\n")
    if what == "file mode":
        path.chmod(0o664)
    elif what == "file owner":
        os.chown(path, 12345, -1)
    else:
        path.parent.chmod(0o777)
    with pytest.raises(Refused, match="can be written by others than root"):
        values("--template big")


def test_names_that_are_none_are_not_offered(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("ok-1.b", ".big.swp", "big~", "list", "a b", "#x#"):
        own(home, name, "# about\n#GSUB -g 1\n#GSUB -t 1h\n")
    assert list(templates()) == ["ok-1.b"]
    print_list({})
    title, row = capsys.readouterr().out.splitlines()
    assert (title.split(), row.split()) == (
        ["NAME", "FROM", "OPTIONS", "ABOUT"],
        "ok-1.b user -g 1 -t 1h about".split(),
    )
    assert [one.value for one in help_module._templates(None, None, "")] == ["list", "ok-1.b"]  # type: ignore[arg-type]


# --- views --------------------------------------------------------------------------------------------------


def save(line: str) -> None:
    words = split_words(line)
    views.save(gq_table(), parse(gq_table(), words, operands_first=True)[0], words)


def view(line: str) -> tuple[dict[str, Any], list[str]]:
    found, operands, _ = parse(gq_table(), split_words(line), operands_first=True)
    return views.applied(gq_table(), found, operands)


def test_a_view_is_saved_shown_changed_and_removed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save("--me --save mine -s PD,R -o '%i %j'")
    save("41 --save=one")
    found, operands = view("--view mine")
    assert (found["me"], found["states"], found["format"], operands) == (True, ["PD", "R"], "%i %j", [])
    assert view("--view mine -s CD")[0]["states"] == ["CD"], "what is typed takes the place of the view's"
    assert (view("--view one")[1], view("--view one 7")[1]) == (["41"], ["7"])
    save("--sav mine -l")
    views.remove("one")
    capsys.readouterr()
    views.print_list({})
    assert capsys.readouterr().out == "mine = -l\n"
    assert [one.value for one in help_module._views(None, None, "m")] == ["mine"]  # type: ignore[arg-type]


WRONG = {
    "--view mien": "there is no view 'mien'",
    "--view old": "the view old: unknown option '--gone'",
    "--save 'a b'": "'a b' is not a name for a view",
    "--save x --view mine": "--save and --view were both given",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_view_is_refused(home: Path, line: str) -> None:
    save("--save mine -l")
    with open(paths.views_file(), "a") as file:
        file.write("old = --gone\n")
    with pytest.raises(GpuschedError) as raised:
        save(line) if "--save" in line else view(line)
    assert WRONG[line] in raised.value.message


# --- completion ---------------------------------------------------------------------------------------------


def test_names_and_ids_of_jobs_are_offered_few_and_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[str(number), "train" if number % 2 else "tree"] for number in range(1, 10_001)]
    rows += [["10001", "a;b"], ["10002", "tr\x1b[2J"], ["10003", "eval"]]
    asked: list[str] = []

    def answer(query: str) -> list[list[Any]]:
        asked.append(query)
        names = [row[1:] for row in rows]
        return names if query.startswith("fields=name") else rows

    monkeypatch.setattr(help_module, "_rows", answer)

    def offered(command: str, line: str) -> list[str]:
        from click.shell_completion import BashComplete

        kind = BashComplete(help_module.click_command(help_module.TABLES[command]()), {}, command, "X")
        *before, last = line.split(" ")
        return [one.value for one in kind.get_completions(before, last)]

    assert offered("gq", "-n tr") == ["train", "tree"]
    assert offered("gcancel", "--name eval,tr") == ["eval,train", "eval,tree"]
    assert offered("gq", "-n a") == []
    assert offered("gshow", "1000") == ["10003", "10002", "10001", "10000", "1000"]
    assert offered("gshow", "ev") == ["10003"]
    assert len(offered("gcancel", "1")) == help_module.MOST_OFFERED
    assert asked[0] == "fields=name&fold=1"
