"""Pipeline files: what they may say, and every mistake with its file and line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.cli.dag import PipelineText, read
from gpusched.cli.job_options import gsub_table
from gpusched.errors import Refused, UsageError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.sh").write_text("#!/bin/sh\n#GSUB -g 2 -t 1h\necho $1\n")
    return tmp_path


def load(folder: Path, text: str, **given: str) -> PipelineText:
    (folder / "p.toml").write_text(text)
    return read("p.toml", given, gsub_table())


def mistakes(folder: Path, text: str, **given: str) -> list[str]:
    with pytest.raises(UsageError) as error:
        load(folder, text, **given)
    return [f"{one.message} | {one.hint}" for one in error.value.mistakes or (error.value,)]


def test_a_step_accepts_gsub_options(folder: Path) -> None:
    text = """
[defaults]
time = "2h"
requeue = true
env = { A = 1, B = "x" }
[step.a]
run = "echo hi"
gpus = "a100:2"
mem = "8G"
cpus = 0.5
retries = 3
retry-on = ["oom", 3]
env = { B = "y" }
requeue = false
min_vram = 1024
[step.b]
wrap = "true"
hold = true
time = 30
nodelist = ["lab1", "lab2"]
"""
    one, two = load(folder, text).steps
    assert one.values == {
        "name": "a",
        "time_limit_s": 7200,
        "requeue": False,
        "extra_env": {"A": "1", "B": "y"},
        "gpus": 2,
        "gpu_type": "a100",
        "gpu_fraction": None,
        "gpu_variants": None,
        "mem_mib": 8192,
        "mem_per_cpu_mib": None,
        "mem_per_gpu_mib": None,
        "cpus": 0.5,
        "retries": 3,
        "retry_on": ["oom", "3"],
        "min_vram_mib": 1024,
    }
    assert (two.values["time_limit_s"], two.values["hold"]) == (1800, True)
    assert two.values["nodelist"] == ("lab1", "lab2")
    assert two.program == {"script": "#!/bin/sh\ntrue\n", "script_name": "wrap", "argv": []}


def test_cumulative_options_may_be_a_table_or_a_list(folder: Path) -> None:
    text = """
[step.a]
run = "x"
env = ["A=1", "B=2"]
res = { scratch = 2 }
[step.b]
run = "x"
sweep = { lr = ["1e-3", 1e-4], seed = "0..2" }
[step.c]
run = "x"
sweep = ["lr=1,2", "seed=0"]
"""
    one, two, three = load(folder, text).steps
    assert (one.values["extra_env"], one.values["resources"]) == ({"A": "1", "B": "2"}, {"scratch": 2})
    assert two.values["sweep"] == ["lr=1e-3,0.0001", "seed=0..2"]
    assert three.values["sweep"] == ["lr=1,2", "seed=0"]


def test_programs_are_read(folder: Path) -> None:
    text = """
[defaults]
time = "3h"
[step.a]
command = ["python", "x.py", 3, true]
[step.b]
script = "train.sh"
args = ["one", 2]
name = "other"
"""
    one, two = load(folder, text).steps
    assert one.program == {"argv": ["python", "x.py", "3", "true"]}
    assert two.program["argv"] == ["one", "2"]
    assert two.program["script_name"] == "train.sh"
    # The script's own lines are below the defaults of the file.
    assert (two.values["gpus"], two.values["time_limit_s"], two.values["name"]) == (2, 10800, "other")


def test_variables_are_expanded(folder: Path) -> None:
    text = """
[vars]
root = "/data"
set = "{root}/set"
lr = 3e-4
[step.a]
run = "train {set} {lr} ${lr} {{lr}} {other} awk '{print $1}' {root}{root}"
name = "{lr}-x"
env = { ROOT = "{root}" }
"""
    (step,) = load(folder, text, root="/fast").steps
    line = step.program["script"].splitlines()[1]
    assert line == "train /fast/set 0.0003 ${lr} {lr} {other} awk '{print $1}' /fast/fast"
    assert step.values["name"] == "0.0003-x"
    assert step.values["extra_env"] == {"ROOT": "/fast"}


MISTAKES = {
    "an unknown key": ('[step.a]\nrun = "x"\n\nretires = 3\n', "p.toml, line 4: step.a has no retires | did you mean"),
    "an option that is not of a step": ('[step.a]\nrun = "x"\nwait = true\n', "p.toml, line 3: step.a has no wait"),
    "an unknown section": ('[stepp.a]\nrun = "x"\n', "p.toml, line 1: a pipeline has no stepp | did you mean step?"),
    "a section of another tool": (
        'name = "x"\n[jobs.a]\nrun = "x"\n',
        "p.toml, line 2: a pipeline has no jobs | known: name, vars, defaults, step",
    ),
    "a value that cannot be read": (
        '[step.a]\nrun = "x"\nmem = "lots"\n',
        "p.toml, line 3: step.a: mem: 'lots' is not a size",
    ),
    "a flag that is no flag": (
        '[step.a]\nrun = "x"\nhold = "yes"\n',
        "p.toml, line 3: step.a.hold is 'yes'; it must be true or false",
    ),
    "nothing to run": ("[step.a]\ncpus = 1\n", "p.toml, line 1: step a: it has nothing to run"),
    "two things to run": (
        '[step.a]\nrun = "x"\ncommand = ["y"]\n',
        "p.toml, line 3: step a: run and command are both given",
    ),
    "arguments without a script": (
        '[step.a]\nrun = "x"\nargs = ["y"]\n',
        "p.toml, line 3: step a: args must be a list",
    ),
    "a script that is not there": ('[step.a]\nscript = "no.sh"\n', "p.toml, line 2: step a: there is no script no.sh"),
    "a command that is a text": (
        '[step.a]\ncommand = "x"\n',
        "p.toml, line 2: step a: command must be a list of strings",
    ),
    "an empty line to run": ('[step.a]\nrun = " "\n', "p.toml, line 2: step a: run must be a string that is not empty"),
    "a step that is no table": ("[step]\na = 1\n", "p.toml, line 2: step.a is a table"),
    "no steps": ('name = "x"\n', "p.toml, line 1: there is no step; write one as [step.NAME]"),
    "a name that is none": ('[step."a b"]\nrun = "x"\n', "p.toml, line 1: 'a b' is not a valid step name"),
    "a need that is no step": (
        '[step.prep]\nrun = "x"\n[step.b]\nrun = "x"\nneeds = ["perp"]\n',
        "p.toml, line 5: step b needs perp, which is not a step | did you mean prep?",
    ),
    "a kind of need that there is not": (
        '[step.a]\nrun = "x"\n[step.b]\nrun = "x"\nneeds = ["afterwards:a"]\n',
        "p.toml, line 5: step b: 'afterwards' in 'afterwards:a' is not one of after, afterany",
    ),
    "all and any": ('[step.a]\nrun = "x"\nneeds = "a,b?c"\n', "p.toml, line 3: step a: 'a,b?c' mixes"),
    "any, and a dependency": (
        '[step.a]\nrun = "x"\n[step.b]\nrun = "x"\nneeds = "a?a"\ndependency = "afterok:1"\n',
        "p.toml, line 5: step b: needs and dependency go together only with ','",
    ),
    "a circle": (
        '[step.a]\nrun = "x"\nneeds = ["c"]\n[step.b]\nrun = "x"\nneeds = ["a"]\n[step.c]\nrun = "x"\nneeds = "b"\n',
        "p.toml, line 3: the steps wait for each other: a -> c -> b -> a | take one",
    ),
    "a step that waits for itself": (
        '[step.a]\nrun = "x"\nneeds = ["a"]\n',
        "p.toml, line 3: the steps wait for each other: a -> a",
    ),
    "a variable with a slip": (
        '[vars]\ndata = "x"\n[step.a]\nrun = "echo {dta}"\n',
        "p.toml, line 4: there is no variable dta | did you mean {data}?",
    ),
    "a variable that is a table": ("[vars]\nx = { a = 1 }\n[step.a]\nrun = 'x'\n", "p.toml, line 2: the variable x"),
    "what is of a step in the defaults": (
        '[defaults]\nneeds = ["a"]\n[step.a]\nrun = "x"\n',
        "p.toml, line 2: needs belongs in a step, not in [defaults]",
    ),
}


@pytest.mark.parametrize(("text", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_reported_with_its_line(folder: Path, text: str, said: str) -> None:
    found = mistakes(folder, text)
    assert len(found) == 1, found
    assert found[0].startswith(said)


def test_all_mistakes_are_reported_in_file_order(folder: Path) -> None:
    alone = [one for one, _ in MISTAKES.values() if one.startswith("[step.a]") and one.count("[step.") == 1]
    count = len(alone)
    found = mistakes(folder, "".join(one.replace("[step.a]", f"[step.s{at}]") for at, one in enumerate(alone)))
    lines = [int(one.split("line ")[1].split(":")[0]) for one in found]
    assert lines == sorted(lines)
    assert len(found) >= count


def test_each_cycle_is_reported(folder: Path) -> None:
    names = {"a": "a", "b": "c", "c": "b", "d": "c", "e": "f", "f": "g", "g": "e"}
    text = "".join(f'[step.{name}]\nrun = "x"\nneeds = "{needs}"\n' for name, needs in names.items())
    circles = [one.split("each other: ")[1].split(" | ")[0] for one in mistakes(folder, text)]
    assert circles == ["a -> a", "b -> c -> b", "e -> f -> g -> e"]


def test_a_variable_may_be_made_empty(folder: Path) -> None:
    (step,) = load(folder, '[vars]\nopt = "--fast"\n[step.a]\nrun = "x {opt}."\n', opt="").steps
    assert step.program["script"].splitlines()[1] == "x ."


def test_an_undefined_variable_is_refused(folder: Path) -> None:
    text = '[vars]\ndata = "x"\n[step.a]\nrun = "x"\n'
    assert mistakes(folder, text, dat="1") == ["p.toml has no variable dat | did you mean data?"]


def test_invalid_and_missing_files_are_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"p.toml is not valid TOML: .*line 1"):
        load(folder, "x = = 1\n")
    with pytest.raises(Refused, match="there is no pipeline file q.toml"):
        read("q.toml", {}, gsub_table())
    (folder / "p.toml").write_bytes(b'name = "\xff"\n')
    with pytest.raises(UsageError, match="not UTF-8 text"):
        read("p.toml", {}, gsub_table())


# A longer name may be near one that is known, which is a mistake and told as that.
_texts = st.text(alphabet="ab{}$-' x", max_size=12).filter(lambda text: not re.search(r"\{[abx-]{3,}\}", text))


@given(st.dictionaries(st.sampled_from(["a", "b", "ab"]), _texts, max_size=3), _texts)
def test_no_text_of_a_step_is_lost_or_read_twice(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, str], text: str
) -> None:
    """Variables go in once; what they bring is not looked at again."""
    folder = tmp_path_factory.getbasetemp()
    lines = [f'{name} = """{value}"""' for name, value in values.items()]
    (folder / "h.toml").write_text('[vars]\nz = "Z"\n' + '[step.s]\ncommand = ["x{z}", """' + text + '"""]\n')
    (step,) = read(str(folder / "h.toml"), {}, gsub_table()).steps
    first, second = step.program["argv"]
    assert first == "xZ"
    if "{" not in text:
        assert second == text
    (folder / "h.toml").write_text("[vars]\n" + "\n".join(lines) + '\n[step.s]\ncommand = ["<{a}>"]\n')
    (step,) = read(str(folder / "h.toml"), {"a": "{b}"} if "a" in values else {}, gsub_table()).steps
    assert step.program["argv"] == (["<{b}>"] if "a" in values else ["<{a}>"])
