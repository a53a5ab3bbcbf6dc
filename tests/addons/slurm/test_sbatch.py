"""sbatch as people and tools type it, beside the outputs of a real one."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from golden_cases import GoldenCase, Places, case, cases, check, check_table
from slurm_lab import SlurmLab

PLACES = Places(mask=[r"batch job (\d+)", r"(?m)^(\d+)$", r"Job (\d+) to", r"on nodes (\S+)"])
"""Ids are those of the run."""

DIFFERS = {
    "041-sbatch-verbose": "a real one names its plug-ins, too",
}
if os.getuid() == 0:
    DIFFERS["076-sbatch-bad-nice-negative"] = "root may raise priorities, as on Slurm"
    DIFFERS["078-sbatch-bad-uid"] = "root may, but a job of ours runs as who submits it: su - USER -c 'sbatch ...'"
ELSEWHERE = {
    "096-sbatch-qos-submit-2": "needs two jobs of its QOS",
}
COMPARED = [one for one in cases("sbatch") if one.name not in ELSEWHERE]


@pytest.mark.parametrize("golden", COMPARED, ids=str)
def test_answers_as_slurm_does(golden: GoldenCase, lab: SlurmLab) -> None:
    done = check(lab, golden, DIFFERS, PLACES, may_explain=True)
    if submitted := re.findall(r"\d+", done.out):
        # Some hold all cores for minutes.
        lab.type(f"gcancel {submitted[-1]}")


def test_every_difference_has_a_reason() -> None:
    check_table("sbatch", DIFFERS, COMPARED)


def test_more_jobs_than_the_qos_allows_are_refused_as_by_slurm(busy: tuple[SlurmLab, dict[int, str]]) -> None:
    lab, _ = busy
    check(lab, case("sbatch", 96), {}, PLACES, may_explain=True)


def test_our_own_sentence_and_hint_follow_slurms(lab: SlurmLab) -> None:
    done = lab.type("sbatch -p nosuch --wrap true")
    assert done.err.splitlines() == [
        "sbatch: error: invalid partition specified: nosuch",
        "sbatch: error: Batch job submission failed: Invalid partition name specified",
        "sbatch: there is no queue 'nosuch'",
        "sbatch: hint: name one of them: -p debug, -p main, -p over",
    ]


@pytest.mark.parametrize("words", ["-x nosuch", "--exclude=node1,node[7-8]"])
def test_a_node_that_does_not_exist_cannot_be_left_out(lab: SlurmLab, words: str) -> None:
    asked = "node nosuch" if "nosuch" in words else "nodes node7 and node8"
    done = lab.type(f"sbatch {words} --wrap true")
    assert (done.code, done.out, done.err.splitlines()) == (
        1,
        "",
        [
            "sbatch: error: Batch job submission failed: Invalid node name specified",
            f"sbatch: asked to leave out {asked}; the nodes here are node1",
            "sbatch: hint: see the nodes with: ginfo",
        ],
    )
    for command, how in (("srun", "Unable to allocate resources"), ("salloc", "Job submit/allocate failed")):
        done = lab.type(f"{command} {words} true")
        assert (done.code, done.out) == (1, "")
        assert done.err.startswith(f"{command}: error: {how}: Invalid node name specified\n")


# --- scripts --------------------------------------------------------------------------------------------


def written(lab: SlurmLab, name: str, text: str) -> str:
    (lab.work / name).write_text(text)
    return name


def spec(lab: SlurmLab, job_id: str) -> dict[str, Any]:
    return dict(lab.job(job_id)["spec"])


def test_directives_have_all_shapes_that_clients_write(lab: SlurmLab) -> None:
    script = written(
        lab,
        "shapes.sh",
        "#!/bin/bash\n\n# a comment\n"
        "#SBATCH --job-name           ss-one\n"
        "#SBATCH\t--comment='two words'\n"
        "#SBATCH --no-requeue \n"
        "#SBATCH --time=0:5:0 --mem=200 --hold     # several, then a comment\n"
        "##SBATCH --nosuch\n#SBATCHX\n # SBATCH --nosuch\n"
        '#SBATCH -o "a b-%j.txt"\n'
        "\n   \n#SBATCH --signal B:USR2@30\n"
        "echo\n#SBATCH --nosuch\n",
    )
    job = lab.job(lab.submit(script))
    assert (job["name"], job["time_limit_s"], job["hold"]) == ("ss-one", 300, "user")
    assert lab.job(job["id"])["spec"]["comment"] == "two words"
    lab.ok(f"gcancel {job['id']}")


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("#SBATCH --job-name  second name", 255, "sbatch: error: Invalid directive found in batch script: name"),
        ("#SBATCH name", 255, "sbatch: error: Invalid directive found in batch script: name"),
        ("#SBATCH --wrap=true", 255, "sbatch: error: Invalid directive found in batch script: --wrap"),
        ("#SBATCH --help", 255, "sbatch: error: Invalid directive found in batch script: --help"),
        (
            "#SBATCH --comment='x",
            255,
            "sbatch: error: Invalid directive found in batch script: the quote ' is not closed",
        ),
        ("#SBATCH --time", 255, "sbatch: option '--time' requires an argument"),
        ("#SBATCH --time=x", 255, "sbatch: error: Invalid --time specification"),
        ("#SBATCH -c 0", 1, 'sbatch: error: Invalid numeric value "0" for --cpus-per-task.'),
        ("#SBATCH --reboot", 255, "sbatch: error: --reboot is not supported: nodes are not rebooted for jobs"),
        ("#SBATCH -p ''", 1, "sbatch: error: invalid partition specified: (null)"),
    ],
)
def test_a_mistake_in_a_directive_is_shown_with_its_line(lab: SlurmLab, line: str, code: int, message: str) -> None:
    script = written(lab, "mistake.sh", f"#!/bin/sh\n# first\n{line}\ntrue\n")
    done = lab.type(f"sbatch {script}")
    assert (done.code, done.out) == (code, "")
    assert done.err.splitlines()[0] == message
    assert done.err.splitlines()[-1] == f"sbatch: mistake.sh, line 3: {line}"


def test_lines_for_gsub_are_not_passed_over_in_silence(lab: SlurmLab) -> None:
    script = written(lab, "ours.sh", "#!/bin/sh\n#GSUB -g 1\n#GSUB -c 2\ntrue\n")
    done = lab.type(f"sbatch {script}")
    assert (done.code, done.err) == (
        0,
        "sbatch: ours.sh, line 2: #GSUB lines are not read by sbatch; submit with gsub\n",
    )


def test_the_command_line_beats_variables_and_these_directives(lab: SlurmLab) -> None:
    script = written(lab, "order.sh", "#!/bin/sh\n#SBATCH -H -t 1 -J one -p over\ntrue\n")
    job = lab.job(lab.submit(f"-t 3 {script}", SBATCH_TIMELIMIT="2", SBATCH_JOB_NAME="two"))
    assert (job["time_limit_s"], job["name"], job["queue"]) == (180, "two", "over")
    lab.ok(f"gcancel {job['id']}")


def test_options_of_the_command_itself_work_in_a_directive(lab: SlurmLab) -> None:
    script = written(lab, "own.sh", "#!/bin/sh\n#SBATCH --parsable            \n#SBATCH --wait\nexit 4\n")
    done = lab.type(f"sbatch {script}")
    assert (done.code, done.err) == (4, "")
    assert done.out.strip().isdigit()


def test_a_script_gets_its_arguments_and_a_gpu(lab: SlurmLab) -> None:
    job = lab.submit("job.sh 1 two 'three four'")
    lab.wait(job)
    # The lab's script counts its arguments as well.
    shown = re.sub(r"gpu: \d", "gpu: 0", lab.text(f"out-{job}.txt")).replace("args: 3 ", "args: ")
    assert shown == case("jobs", 33).out


def test_a_script_is_copied_and_found_on_the_path(lab: SlurmLab) -> None:
    path = lab.bin / "found.sh"
    path.write_text("#!/bin/sh\n#SBATCH --hold\necho first > copied\n")
    job = lab.submit("found.sh")
    path.write_text("#!/bin/sh\necho second > copied\n")
    lab.ok(f"gctl release {job}") if (lab.bin / "gctl").exists() else lab.ok(f"scontrol release {job}")
    lab.wait(job)
    assert lab.text("copied") == "first\n"


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("sbatch {} here.sh", "{work}/here.sh"),
        ("sbatch {} ./here.sh one 'two words'", "{work}/here.sh one 'two words'"),
        ("cd bin && sbatch {} .././'it'\\''s a script.sh' last", "{work}/bin/.././it's a script.sh last"),
        ("PATH=$PWD/bin:$PATH sbatch {} -D / found.sh", "{work}/bin/found.sh"),
        ("sbatch {} < here.sh", "(null)"),
        ("cat here.sh | sbatch {} /dev/stdin", "/dev/stdin"),
        ("sbatch {} --wrap 'bash here.sh'", "(null)"),
        ("gsub {} ./here.sh one", "{work}/here.sh one"),
        ("gsub {} - one < here.sh", "(null)"),
        ("gsub {} -- bash here.sh", "bash here.sh"),
    ],
)
def test_the_command_of_a_job_is_its_script_by_its_whole_path(lab: SlurmLab, line: str, command: str) -> None:
    (lab.work / "bin").mkdir(exist_ok=True)
    for name in ("here.sh", "it's a script.sh", "bin/found.sh"):
        (lab.work / name).write_text("#!/bin/sh\ntrue\n")
    job = lab.ok(line.format("--parsable --hold -t 5")).strip()
    command = command.format(work=lab.work)
    assert f"\n   Command={command}\n" in lab.ok(f"scontrol show job {job}")
    assert lab.ok(f"squeue -h -j {job} -o '<%o>'; squeue -h -j {job} -O 'Command:<'") == f"<{command}>\n{command}<\n"
    (document,) = json.loads(lab.ok(f"squeue -j {job} --json"))["jobs"]
    assert document["command"] == ("" if command == "(null)" else command)
    lab.ok(f"scancel {job}")


def test_a_script_from_dev_stdin_may_be_large(lab: SlurmLab) -> None:
    script = "#!/bin/sh\n" + "# padding\n" * 20_000 + "echo large > large\n"
    done = lab.type("sbatch --parsable /dev/stdin", stdin=script.encode())
    lab.wait(done.out.strip())
    assert (lab.text("large"), lab.job(done.out.strip())["name"]) == ("large\n", "stdin")


def test_a_nul_byte_is_refused(lab: SlurmLab) -> None:
    done = lab.type("sbatch", stdin=b"#!/bin/sh\n\0\n")
    assert (done.code, done.out) == (1, "")
    assert "NULL character" in done.err


# --- environment and files ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("export", "seen"),
    [
        ("ALL", "own=1 other=2 new="),
        ("NONE", "own= other= new="),
        ("OWN", "own=1 other= new="),
        ("OWN,NEW='a,b'", "own=1 other= new=a,b"),
        ("ALL,NEW=3", "own=1 other=2 new=3"),
        ("OWN=5", "own=5 other= new="),
    ],
)
def test_the_environment_is_what_export_says(lab: SlurmLab, export: str, seen: str) -> None:
    job = lab.submit(
        f'-o env-%j --export="{export}" --wrap \'echo "own=$OWN other=$OTHER new=$NEW"\'', OWN="1", OTHER="2"
    )
    lab.wait(job)
    assert lab.text(f"env-{job}") == f"{seen}\n"


def test_variables_may_come_from_a_file(lab: SlurmLab) -> None:
    (lab.work / "variables").write_bytes(b"OWN=from a file\0NEW=x\ny\0")
    job = lab.submit("-o file-%j --export-file=variables --wrap 'echo \"$OWN,$NEW,$OTHER\"'", OWN="1", OTHER="2")
    lab.wait(job)
    assert lab.text(f"file-{job}") == "from a file,x\ny,\n"
    assert lab.type("sbatch --export-file=/nosuch --wrap true").err == "sbatch: error: Unable to open file /nosuch\n"


def test_relative_outputs_are_in_the_working_directory(lab: SlurmLab) -> None:
    (lab.work / "100%").mkdir()
    job = lab.submit("-D 100% -J a/b -e err-%j --wrap 'pwd; echo $SLURM_SUBMIT_DIR; echo bad >&2'")
    lab.wait(job)
    assert lab.text(f"100%/slurm-{job}.out") == f"{lab.work}/100%\n{lab.work}\n"
    assert lab.text(f"100%/err-{job}") == "bad\n"


def test_patterns_of_outputs_are_slurms(lab: SlurmLab) -> None:
    job = lab.submit("--array=7 -J 'a b' -o 'p-%A-%a-%x-%u-%n-%t-%s-%b-%5a-%%.txt' --wrap true")
    lab.wait(job)
    user = lab.job(job)["user"]
    assert [path.name for path in lab.work.glob("p-*")] == [f"p-{job}-7-a b-{user}-0-0-batch-%b-00007-%.txt"]


def test_arrays_have_slurms_default_names(lab: SlurmLab) -> None:
    job = lab.submit("--array=2 --wrap true")
    lab.wait(job)
    assert lab.text(f"slurm-{job}_2.out") == ""


@pytest.mark.parametrize(("mode", "text"), [("append", "before\nafter\n"), ("truncate", "after\n")])
def test_an_output_that_exists_is_appended_to_or_replaced(lab: SlurmLab, mode: str, text: str) -> None:
    (lab.work / f"mode-{mode}").write_text("before\n")
    lab.wait(lab.submit(f"-o mode-{mode} --open-mode={mode} --wrap 'echo after'"))
    assert lab.text(f"mode-{mode}") == text


# --- results --------------------------------------------------------------------------------------------


def test_only_a_named_cluster_is_part_of_the_result(lab: SlurmLab) -> None:
    assert re.fullmatch(r"Submitted batch job \d+ on cluster lab\n", lab.ok("sbatch -M all --wrap true"))
    assert re.fullmatch(r"\d+;lab\n", lab.ok("sbatch --parsable -M lab --wrap true"))
    done = lab.type("sbatch -M other --wrap true")
    assert (done.code, done.out, done.err) == (1, "", "sbatch: error: No cluster 'other' known by database.\n")


def test_notes_are_on_stderr_unless_quiet(lab: SlurmLab) -> None:
    done = lab.type("sbatch --hint=nomultithread --tmp=1G --wrap true")
    assert re.fullmatch(r"Submitted batch job \d+\n", done.out)
    assert [line.split(":")[1] for line in done.err.splitlines()] == [" --hint has no effect", " --tmp has no effect"]
    assert lab.type("sbatch -Q --hint=nomultithread --wrap true").err == ""


@pytest.mark.parametrize(("line", "code"), [("exit 7", 7), ("exit 300", 44), ("kill -9 $$", 1), ("true", 0)])
def test_wait_exits_with_the_code_of_the_job(lab: SlurmLab, line: str, code: int) -> None:
    assert lab.type(f"sbatch -Q -W --wrap '{line}'").code == code


def test_wait_for_a_cancelled_job_is_a_failure(lab: SlurmLab) -> None:
    done = lab.type(
        "(sbatch -W --hold --wrap true > of; echo $? > code) & "
        "while [ ! -s of ]; do sleep 0.02; done; gcancel $(grep -o '[0-9]*' of); wait; cat code"
    )
    assert done.out.splitlines()[-1] == "1", done


def test_a_dry_run_of_what_cannot_be_had_fails(lab: SlurmLab) -> None:
    done = lab.type("sbatch --test-only --gres=gpu:9 --wrap true")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("sbatch: error: allocation failure: Requested node configuration is not available\n")


def test_without_a_daemon_the_controller_cannot_be_reached(lab: SlurmLab, tmp_path: Path) -> None:
    done = lab.type("sbatch --wrap true", GPUSCHED_SOCKET=str(tmp_path / "none"))
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("sbatch: error: Unable to contact slurm controller (connect failure)\n")


def test_dependencies_have_slurms_forms(lab: SlurmLab) -> None:
    first = lab.submit("--hold --wrap true")
    second = lab.submit("--hold --wrap true")
    waiting = [
        lab.submit(f"-d '{text}' --wrap true")
        for text in (
            f"afterok:{first},{second}",
            f"afterok:{first}:{second}",
            f"afterany:{first}?afternotok:{second}",
            f"after:{first}+5",
            "afterok:99999999",
        )
    ]
    assert {lab.state(job) for job in waiting} == {"PENDING"}
    lab.ok(f"gcancel {first}")
    lab.wait_state(waiting[2], "COMPLETED")
    # Never satisfied: it stays, unless it is to be cancelled.
    assert lab.state(waiting[0]) == "PENDING"
    gone = lab.submit(f"--kill-on-invalid-dep=yes -d afterok:{first} --wrap true")
    lab.wait_state(gone, "CANCELLED")
    lab.ok(f"gcancel {second} {' '.join(waiting)}")


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("sbatch -N 2 -n 4 --ntasks-per-node=1 --wrap true", "sbatch: hint: see the tasks in sbatch --help"),
        (
            "sbatch -N 2 --test-only -n 4 --ntasks-per-node=1 --wrap true",
            "sbatch: hint: see the tasks in sbatch --help",
        ),
        ("srun -N 2 -n 4 --ntasks-per-node=1 true", "srun: hint: see the tasks in srun --help"),
        ("salloc -N 2 -n 4 --ntasks-per-node=1 true", "salloc: hint: see the tasks in salloc --help"),
    ],
)
def test_a_hint_names_the_help_of_the_typed_command(lab: SlurmLab, line: str, hint: str) -> None:
    done = lab.type(line)
    assert done.code != 0
    assert done.err.splitlines()[-1] == hint
