"""A script's directives, and gsub's sources of options against each other, up to the request that is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_daemon import FakeDaemon

from gpusched.cli import gsub
from gpusched.cli.job_options import gsub_table
from gpusched.cli.submission import check_script, directives
from gpusched.errors import Refused, UsageError

Submit = Callable[..., dict[str, Any]]


def read(text: str) -> dict[str, Any]:
    return directives(gsub_table(), text.encode("utf-8", "surrogateescape"), "job.sh")


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Submit]:
    """Runs gsub in this process; returns the specification that it sends."""
    daemon = FakeDaemon(tmp_path / "api.sock", lambda *_: {"job": {"id": "1"}})
    monkeypatch.setenv("GPUSCHED_SOCKET", str(daemon.path))
    monkeypatch.chdir(tmp_path)

    def run(*words: str, script: str | None = None, **env: str) -> dict[str, Any]:
        if script is not None:
            (tmp_path / "job.sh").write_text("#!/bin/sh\n" + script + "\ntrue\n")
            words = (*words, "job.sh")
        with monkeypatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            assert gsub.body(list(words)) == 0
        assert capsys.readouterr().out == "Submitted job 1\n"
        method, path, body = daemon.requests[-1]
        assert (method, path) == ("POST", "/v1/jobs")
        spec: dict[str, Any] = body["spec"]
        return spec

    yield run
    daemon.close()


def test_directives_stop_at_the_first_command() -> None:
    text = "#!/bin/sh\n\n# words\n#GSUB -t 5\n   \n  # more\n#SBATCH -c 2\ntrue\n#GSUB -c 4\n"
    assert read(text) == {"time_limit_s": 300, "cpus": 2.0}


def test_later_lines_win_and_variables_add_up() -> None:
    assert read("#!/bin/sh\n#GSUB -E A=1 -c 2\n#SBATCH -c 3\n#GSUB -E B=2\n") == {
        "extra_env": {"A": "1", "B": "2"},
        "cpus": 3.0,
    }


@pytest.mark.parametrize("line", ["#GSUBX -t soon", "#gsub -t soon", " #GSUB -t soon", "##GSUB -t soon", "# GSUB -t x"])
def test_a_line_that_only_looks_like_a_directive_is_a_comment(line: str) -> None:
    assert read(f"#!/bin/sh\n{line}\n") == {}


@pytest.mark.parametrize("line", ["#GSUB", "#SBATCH   ", "#SBATCH\t", "#SBATCH # nothing yet"])
def test_a_directive_without_options_is_ignored(line: str) -> None:
    assert read(f"#!/bin/sh\n{line}\n") == {}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("#SBATCH --nosuch=1", "unknown option '--nosuch'"),
        ("#SBATCH --nodes=4-2", "ends before it begins"),
        ("#SBATCH --exclusive=me", "neither user nor mcs"),
        ("#SBATCH --uid=root", "--uid: it is not supported: a job runs as the user who submits it"),
        ("#SBATCH --reboot", "--reboot: it is not supported"),
        ("#SBATCH --job-name  second name", "'name' is not an option"),
        ("#GSUB -h", "--help makes no sense in a script"),
        ("#GSUB -f", "--follow makes no sense in a script"),
        ("#GSUB --foll", "--follow makes no sense in a script"),
        ("#GSUB --dry-run", "--dry-run makes no sense in a script"),
        ("#GSUB --wrap true", "--wrap makes no sense in a script"),
        ("#GSUB -J 'x", "quote"),
        ("#GSUB -t", "-t needs a value"),
    ],
)
def test_no_directive_is_ignored(line: str, says: str) -> None:
    with pytest.raises(UsageError) as raised:
        read(f"#!/bin/sh\n#GSUB -c 1\n{line}\n")
    assert raised.value.message.startswith("job.sh, line 3: ")
    assert says in raised.value.message
    assert raised.value.exit_code == 2


BAD = """#!/bin/sh
#SBATCH --time=soon --mem lots
#SBATCH -c 2
#SBATCH --nosuch=1 --begin never
#GSUB -J 'x
#GSUB --wrap true name
"""


def test_options_of_slurm_without_effect_are_read_with_a_note_each() -> None:
    text = (
        "#!/bin/sh\n#SBATCH --hint=nomultithread --get-user-env\n#SBATCH --no-kill=off --contiguous --exclusive=user\n"
    )
    found = read(text)
    assert [text.partition(":")[0] for text in found.pop("slurm_notes")] == [
        "--hint has no effect",
        "--get-user-env has no effect",
        "--no-kill has no effect",
        "--contiguous has no effect",
        "--exclusive=user",
    ]
    assert found == {"exclusive": True}


def test_all_bad_directives_are_reported_at_once_with_their_lines() -> None:
    with pytest.raises(UsageError) as raised:
        read(BAD)
    said = [one.message for one in raised.value.mistakes]
    assert [text.split(": ")[:2] for text in said] == [
        ["job.sh, line 2", "--time"],
        ["job.sh, line 2", "--mem"],
        ["job.sh, line 4", "unknown option '--nosuch'"],
        ["job.sh, line 5", "the quote ' is not closed"],
        ["job.sh, line 6", "'name' is not an option"],
        ["job.sh, line 6", "--wrap makes no sense in a script"],
    ]
    assert raised.value.message == "; ".join(said)


def test_bad_defaults_and_bad_directives_are_reported_together(submit: Submit) -> None:
    with pytest.raises(UsageError) as raised:
        submit(script="#GSUB -t soon\n#GSUB -c many", GSUB_MEM="lots", GSUB_COLOUR="red", GSUB_WRAP="true")
    said = [one.message for one in raised.value.mistakes]
    assert [text.partition(": ")[0] for text in said[:2]] == ["job.sh, line 2", "job.sh, line 3"]
    assert sorted(said[2:]) == [
        "the variable GSUB_COLOUR: unknown option '--colour'",
        "the variable GSUB_MEM: --mem: 'lots' is not a size; write it as 8G, 8GiB or 8192 (MiB)",
        "the variable GSUB_WRAP makes no sense: --wrap is for the command line only",
    ]
    assert {one.hint for one in raised.value.mistakes[2:]} == {
        f"remove it with: unset GSUB_{name}" for name in ("COLOUR", "MEM", "WRAP")
    }


@pytest.mark.parametrize(
    ("name", "body", "hint"),
    [
        (
            "train.py",
            b"print(1)\n",
            "run it with: gsub -- python train.py; or make its first line #!/usr/bin/env python",
        ),
        ("fit.R", b"x <- 1\n", "run it with: gsub -- Rscript fit.R; or make its first line #!/usr/bin/env Rscript"),
        ("train.sh", b"true\n", "make its first line #!/bin/bash"),
        ("train", b"true\n", "make its first line #!/bin/bash"),
        ("train.py", b"", "give it a first line #!/usr/bin/env python and a command"),
        ("train", b"\x7fELF\0", "run it with: gsub -- ./train"),
        ("bin/train", b"\x7fELF\0", "run it with: gsub -- bin/train"),
    ],
)
def test_the_hint_names_the_interpreter_of_the_script(name: str, body: bytes, hint: str) -> None:
    with pytest.raises(Refused) as raised:
        check_script(body, name)
    assert raised.value.hint == hint


def test_an_invalid_script_says_how_to_fix_it() -> None:
    for body, fix in (
        (b"", "#!/bin/bash"),
        (b"true\n", "#!/bin/bash"),
        (b"#!/bin/sh\r\n", "sed"),
        (b"#!\0", "gsub --"),
    ):
        with pytest.raises(Refused) as raised:
            check_script(body, "job.sh")
        assert fix in raised.value.hint
    check_script(b"#!/bin/sh\necho 'a\r\n'\n", "job.sh")


@pytest.mark.parametrize(
    ("script", "env", "words", "expected"),
    [
        ("#GSUB -t 5", {}, [], {"time_limit_s": 300}),
        ("#GSUB -t 5", {"GSUB_TIME": "6"}, [], {"time_limit_s": 360}),
        ("#GSUB -t 5", {"GSUB_TIME": "6"}, ["-t", "7"], {"time_limit_s": 420}),
        ("#GSUB -t 5", {}, ["-t", "0"], {"time_limit_s": "unlimited"}),
        ("#SBATCH --time=auto", {}, [], {"time_limit_s": "auto"}),
        ("#GSUB -t auto", {"GSUB_TIME": "6"}, [], {"time_limit_s": 360}),
        ("#GSUB -t 5", {"GSUB_TIME": "auto"}, [], {"time_limit_s": "auto"}),
        ("#GSUB -g a100:2", {}, ["-g", "1"], {"gpus": 1}),
        ("#GSUB -g a100:2\n#GSUB -g 0.5", {}, ["-g", "1"], {"gpus": 1}),
        ("#GSUB -g 2", {}, ["-g", "0.5"], {"gpu_fraction": 0.5}),
        ("#GSUB -g 2", {"GSUB_GPUS": "t4:0.5"}, [], {"gpu_fraction": 0.5, "gpu_type": "t4"}),
        ("#GSUB --mem-per-cpu 1G -c 3", {}, [], {"mem_per_cpu_mib": 1024}),
        ("#GSUB --mem-per-cpu 1G -c 3", {}, ["--mem", "5G"], {"mem_mib": 5120}),
        ("#GSUB --mem 5G", {}, ["--mem-per-cpu", "1G"], {"mem_per_cpu_mib": 1024}),
        ("#GSUB --gpus-per-task 1 -n 2", {}, ["-g", "1"], {"ntasks": 2, "gpus": 1}),
        ("#SBATCH -N 1-2", {}, ["-N", "1"], {"nodes": 1}),
        ("#GSUB --hold", {"GSUB_HOLD": "0"}, [], {"hold": True}),
        ("", {"GSUB_HOLD": "1"}, [], {"hold": True}),
        ("#GSUB --requeue", {}, ["--no-requeue"], {"requeue": False}),
    ],
)
def test_the_command_line_overrides_variables_and_these_override_the_script(
    submit: Submit, script: str, env: dict[str, str], words: list[str], expected: dict[str, Any]
) -> None:
    spec = submit(*words, script=script, **env)
    asked = (
        "time_limit_s gpus gpu_fraction gpu_type mem_mib mem_per_cpu_mib nodes nodes_max ntasks hold requeue".split()
    )
    assert {key: spec[key] for key in asked if key in spec} == expected


def test_job_variables_combine_script_and_command_line(submit: Submit) -> None:
    env = submit("-E", "B=3", "-E", "C=4", script="#GSUB -E A=1 -E B=2")["env"]
    assert (env["A"], env["B"], env["C"]) == ("1", "3", "4")


def test_the_job_does_not_get_the_submitters_socket_or_gpus(submit: Submit) -> None:
    env = submit("--", "true", CUDA_VISIBLE_DEVICES="7", KEPT="yes")["env"]
    assert "GPUSCHED_SOCKET" not in env
    assert "CUDA_VISIBLE_DEVICES" not in env
    assert env["KEPT"] == "yes"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("GSUB_COLOUR", "red", "the variable GSUB_COLOUR: unknown option '--colour'"),
        ("GSUB_TIME", "soon", "the variable GSUB_TIME: --time: 'soon' is not a time"),
        ("GSUB_WRAP", "true", "the variable GSUB_WRAP makes no sense"),
        ("GSUB_HELP", "1", "the variable GSUB_HELP makes no sense"),
    ],
)
def test_an_invalid_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as raised:
        gsub.body(["--", "true"])
    assert says in raised.value.message


def test_a_batch_cannot_be_followed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--follow goes with one job"):
        gsub.body(["--batch", str(tmp_path / "lines"), "-f"])
