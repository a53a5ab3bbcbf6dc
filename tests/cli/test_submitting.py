"""gsub: every way to say what to run, precedence, what a script gets back, and what bad input gets."""

from __future__ import annotations

import getpass
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from shell import Shell
from support import wait_until

from gpusched.client import DaemonConnection
from gpusched.errors import UsageError

HEAVY = (
    "socket selectors sqlite3 sqlite_utils aiohttp asyncio rich typer click dataclasses typing subprocess psutil "
    "pathlib argparse pynvml msgspec"
)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_gsub_imports_no_heavy_modules() -> None:
    code = "import sys; import gpusched.cli.gsub, gpusched.cli.gq; print(*sys.modules)"
    argv = [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"]
    loaded = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    assert {*HEAVY.split(), "re", "enum", "difflib"} & set(loaded) == set()
    assert len(loaded) < 90


def test_the_first_gsub_starts_the_daemon_and_prints_one_line(own: Shell) -> None:
    done = own.type("gsub", "--", "true")
    assert (done.code, done.out, done.err) == (0, "Submitted job 1\n", "")
    assert own.ok("gsub", "--parsable", "--", "true") == "2\n"
    assert own.type("gwait", "1", "2").code == 0


def test_two_concurrent_first_gsubs_start_one_daemon(own: Shell) -> None:
    running = [
        subprocess.Popen(
            own.argv("gsub", "--parsable", "--", "true"), env=own.env, cwd=own.work, stdout=subprocess.PIPE
        )
        for _ in range(4)
    ]
    ids = sorted(int(process.communicate(timeout=60)[0]) for process in running)
    assert ids == [1, 2, 3, 4]


def test_a_daemon_that_root_starts_has_precedence_over_its_jobs(own: Shell) -> None:
    probe = "test $(cat /proc/sys/kernel/sched_autogroup_enabled) = 1 && echo -10 > /proc/self/autogroup"
    if subprocess.run(["sh", "-c", probe], start_new_session=True, capture_output=True).returncode:
        pytest.skip("only root may take precedence, where the kernel shares CPU time among sessions")
    # Not forked from another one, as `own.type` does.
    argv = own.argv("gsub", "--parsable", "--", "sleep", "600")
    assert subprocess.run(argv, env=own.env, cwd=own.work, capture_output=True, timeout=60).stdout == b"1\n"
    with DaemonConnection(str(own.home / "run" / "api.sock")) as client:
        daemon = client.call("GET", "/v1/status")["daemon"]["pid"]
        wait_until(lambda: client.call("GET", "/v1/jobs/1")["job"]["runs"][-1]["pid"], what="the job's process")
        job = client.call("GET", "/v1/jobs/1")["job"]["runs"][-1]["pid"]
    groups = [Path(f"/proc/{pid}/autogroup").read_text() for pid in (daemon, job)]
    assert [group.split()[1:] for group in groups] == [["nice", "-10"], ["nice", "0"]]
    assert os.getpriority(os.PRIO_PROCESS, daemon) == 0


def test_a_script_takes_directives_arguments_and_precedence(sh: Shell, tmp_path: Path) -> None:
    script = write(
        tmp_path / "train.sh",
        "#!/bin/bash\n"
        "#SBATCH --job-name=from-script --time=5     # minutes\n"
        "#SBATCH\t--gres=gpu:a100:1\n"
        "\n"
        "# a comment\n"
        "#GSUB -c 2 --mem 4G -E 'WHO=script writer' -o %x-%j.log\n"
        'echo "$WHO:$1:$CUDA_VISIBLE_DEVICES"\n'
        "#SBATCH --nodes=99\n",
    )
    env = {"GSUB_TIME": "10m", "GSUB_CPUS": "3"}
    job = json.loads(sh.ok("gsub", "--json", "-c", "4", script, "an arg", **env))["job"]
    assert (job["name"], job["time_limit_s"], job["cpus"], job["mem_mib"]) == ("from-script", 600, 4.0, 4096)
    assert job["gpu_request"] == "a100:1"
    sh.ok("gwait", job["id"])
    assert (tmp_path / f"from-script-{job['id']}.log").read_text().startswith("script writer:an arg:")


def test_standard_input_is_read_as_a_script(sh: Shell) -> None:
    done = sh.type("gsub", "--parsable", "-f", stdin=b"#!/bin/sh\necho from stdin\n")
    assert done.code == 0
    assert done.out.splitlines()[1:] == ["from stdin"]


def test_an_empty_shell_line_is_refused(sh: Shell) -> None:
    """Mostly that of a variable that is not set."""
    for line in ("", " \n"):
        done = sh.type("gsub", "--wrap", line)
        assert (done.code, done.out) == (2, "")
        assert "--wrap is empty: there is nothing to run" in done.err


def test_wrap_takes_a_shell_line(sh: Shell) -> None:
    done = sh.type("gsub", "--quiet", "--follow", "--wrap", "echo $((6*7)); exit 3")
    assert done.out.splitlines()[1:] == ["42"]
    assert done.code == 3
    assert "FAILED: exit code 3" in done.err


def test_a_command_keeps_its_options_and_words(sh: Shell) -> None:
    job_id = sh.submit("-o", "out", "--", "printf", "%s|", "-c", "a b", "--json", "*")
    sh.ok("gwait", job_id)
    assert (sh.work / "out").read_text() == "-c|a b|--json|*|"


def test_wait_returns_the_exit_code_of_the_job(sh: Shell) -> None:
    assert sh.type("gsub", "-W", "--quiet", "--wrap", "exit 17").code == 17
    assert sh.type("gsub", "-W", "--quiet", "--wrap", "kill -KILL $$").code == 137
    assert sh.type("gsub", "-W", "--quiet", "--", "/no/such/program").code == 1
    assert sh.type("gsub", "-W", "--quiet", "--", "true").code == 0


def test_a_line_that_is_no_command_refuses_the_whole_batch(sh: Shell) -> None:
    before = sh.ok("gq", "-a", "--quiet")
    done = sh.type("gsub", "--batch", "-", stdin=b"# first\ntrue\necho \0\ntrue\n")
    assert (done.code, done.out) == (1, "")
    assert "standard input, line 3: a command cannot hold a NUL byte" in done.err
    for line, says in (
        ("echo \0", "holds a NUL byte"),
        ("echo \ud800", "cannot be encoded"),
        ("x" * (1 << 20) + "y", "1 MiB"),
    ):
        with DaemonConnection(str(sh.home / "run" / "api.sock")) as client, pytest.raises(UsageError) as refused:
            client.call("POST", "/v1/jobs", {"spec": {"work_dir": "/"}, "batch": ["true", line, "true"]})
        assert "line 2 of the batch" in refused.value.message
        assert says in refused.value.message
    assert sh.ok("gq", "-a", "--quiet") == before


def test_a_batch_prints_its_ids_in_order(sh: Shell, tmp_path: Path) -> None:
    lines = write(tmp_path / "jobs", "echo one > one\n\n# a comment\necho two > two; exit 2\n")
    ids = sh.ok("gsub", "--parsable", "--batch", lines).split()
    assert int(ids[1]) == int(ids[0]) + 1
    assert sh.type("gwait", *ids).code == 1
    assert (tmp_path / "two").read_text() == "two\n"
    done = sh.type("gsub", "--batch", "-", stdin=b"true\n")
    assert done.out.startswith("Submitted job ")


def test_the_environment_can_be_chosen(sh: Shell) -> None:
    env = {"KEEP": "1", "DROP": "1"}
    for export, seen in (("ALL", "1 1 "), ("NONE", "  "), ("KEEP,NEW=2", "1  2"), ("ALL,DROP=9", "1 9 ")):
        done = sh.type("gsub", "--quiet", "-f", "--export", export, "--wrap", 'echo "$KEEP $DROP $NEW"', **env)
        assert done.out.splitlines()[1].rstrip() == seen.rstrip(), export


def test_an_undecodable_environment_is_preserved(sh: Shell) -> None:
    environ = {os.fsencode(key): os.fsencode(value) for key, value in sh.env.items()}
    environ[b"ODD"] = b"\xff\xfe=\n"
    argv = sh.argv("gsub", "--quiet", "-W", "-o", "odd", "--", "printenv", "ODD")
    assert subprocess.run(argv, env=environ, cwd=sh.work, stdout=subprocess.DEVNULL).returncode == 0
    assert (sh.work / "odd").read_bytes() == b"\xff\xfe=\n\n"


def test_undecodable_bytes_survive_the_job_and_the_table(own: Shell) -> None:
    """In arguments, the environment, the working directory, the name and the output path, over a restart."""
    environ = {**{os.fsencode(key): os.fsencode(value) for key, value in own.env.items()}, b"ODD": b"\xff=\x80"}
    folder = os.fsencode(own.work) + b"/w\xfe"
    os.mkdir(folder)
    script = b'printf "%s|%s|%s" "$1" "$ODD" "$(pwd)"'
    argv = own.argv(
        "gsub", "--parsable", "-H", "-o", b"out\xfd", "-J", b"n\xfc", "--", "sh", "-c", script, "sh", b"\xff\xc3"
    )
    done = subprocess.run(argv, env=environ, cwd=folder, capture_output=True, check=True)
    job_id = done.stdout.decode().strip()
    own.ok("gpusched", "daemon", "stop")
    own.ok("gctl", "release", job_id)
    assert own.type("gwait", job_id).code == 0
    assert Path(os.fsdecode(folder + b"/out\xfd")).read_bytes() == b"\xff\xc3|\xff=\x80|" + folder
    (job,) = json.loads(own.ok("gshow", "--json", job_id))["jobs"]
    assert os.fsencode(job["name"]) == b"n\xfc"
    assert os.fsencode(job["stdout_path"]) == folder + b"/out\xfd"
    launch = job["spec"]["launch"]
    assert os.fsencode(launch["argv"][-1]) == b"\xff\xc3"
    assert os.fsencode(launch["work_dir"]) == folder


def test_a_dry_run_records_nothing(sh: Shell) -> None:
    before = sh.ok("gq", "-a", "--quiet")
    assert "would start now on lab1, GPU 2" in sh.ok("gsub", "--dry-run", "-g", "1", "--", "true")
    refused = sh.type("gsub", "--dry-run", "-g", "9", "--", "true")
    assert refused.code == 1
    assert "9 GPUs" in refused.out
    assert json.loads(sh.ok("gsub", "--dry-run", "--json", "--hold", "--", "true"))["dry_run"]["verdict"] == "waits"
    assert sh.ok("gq", "-a", "--quiet") == before


GOOD = "#!/bin/sh\ntrue\n"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--colour", "red", "--", "true"], 2, "--colour"),
        (["--tim", "5", "--", "true"], 0, ""),
        (["--me", "5", "--", "true"], 2, "is short for --mem, --mem-per-cpu"),
        (["-g", "two", "--", "true"], 1, "two"),
        (["-g", "-1", "--", "true"], 2, "-1"),
        (["-g", "1e3", "--", "true"], 2, "1e3"),
        (["-g", "99999999999999999999", "--", "true"], 2, "out of range"),
        (["-g", "5", "--", "true"], 1, "-g 3"),
        (["-g", "h100:1", "--", "true"], 1, "h100"),
        (["--vram", "100G", "--", "true"], 1, "100G"),
        (["--mem", "lots", "--", "true"], 2, "'lots'"),
        (["--mem", "1T", "--", "true"], 1, "memory"),
        (["-c", "65", "--", "true"], 1, "64"),
        (["-c", "nan", "--", "true"], 2, "nan"),
        (["-t", "soon", "--", "true"], 2, "'soon'"),
        (["-t", "-5", "--", "true"], 2, "'-5'"),
        (["--begin", "whenever", "--", "true"], 2, "'whenever'"),
        (["--signal", "HUGE@5", "--", "true"], 2, "'HUGE'"),
        (["--retry-on", "sometimes", "--", "true"], 2, "sometimes"),
        (["-d", "afterok:99999", "--", "true"], 1, "99999"),
        (["-d", "sometime:1", "--", "true"], 2, "sometime"),
        (["-E", "NOEQUALS", "--", "true"], 2, "KEY=VALUE"),
        (["--open-mode", "sideways", "--", "true"], 2, "sideways"),
        (["-t"], 2, "needs a value"),
        (["--hold=yes", "--", "true"], 2, "takes no value"),
        (["--"], 2, "no command"),
        (["--wrap", "true", "script.sh"], 2, "both"),
        (["no-such-script.sh"], 1, "no-such-script.sh"),
        (["."], 1, "folder"),
    ],
)
def test_an_invalid_submission_is_explained_in_a_sentence(sh: Shell, words: list[str], code: int, says: str) -> None:
    before = sh.ok("gq", "-a", "--quiet").split()
    done = sh.type("gsub", *words)
    assert done.code == code, done
    if code:
        assert says in done.err
        assert done.out == ""
        assert "Traceback" not in done.err
        assert done.err.startswith("gsub: error: ")
        assert len(done.err.splitlines()) <= 2
        assert sh.ok("gq", "-a", "--quiet").split() == before


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ("", 1, "empty"),
        ("echo no shebang\n", 1, "#!"),
        ("#!/bin/sh\r\ntrue\r\n", 1, "DOS"),
        ("#!/bin/sh\necho \0\n", 1, "NUL"),
        ("#!/bin/sh\n#SBATCH --colour=red\n", 2, "line 2"),
        ("#!/bin/sh\n\n#SBATCH --mail-type=STAGE_OUT\n", 2, "line 3"),
        ("#!/bin/sh\n#SBATCH --job-name  second name\n", 2, "'name'"),
        ("#!/bin/sh\n#SBATCH --time='5\n", 2, "quote"),
        ("#!/bin/sh\n#GSUB --mem lots\n", 2, "line 2"),
        ("#!/bin/sh\n#GSUB --batch x\n", 2, "makes no sense"),
    ],
)
def test_a_mistake_in_a_script_is_named_with_its_line(
    sh: Shell, tmp_path: Path, body: str, code: int, says: str
) -> None:
    done = sh.type("gsub", write(tmp_path / "job.sh", body))
    assert done.code == code, done
    assert says in done.err
    assert "job.sh" in done.err


def test_names_in_a_script_are_labels_where_nothing_of_the_kind_is_configured(sh: Shell, tmp_path: Path) -> None:
    script = write(
        tmp_path / "job.sh",
        "#!/bin/sh\n#SBATCH --account=lab\n#SBATCH --qos=high\n#SBATCH -p course\n#SBATCH -H\ntrue\n",
    )
    done = sh.type("gsub", script)
    assert done.code == 0, done
    me = getpass.getuser()
    assert done.err == (
        "gsub: no queues, accounts or QOS are configured, so queue course, account lab and QOS high are just names; "
        f"use counts for {me}\n"
    )
    job_id = done.out.split()[-1]
    shown = sh.ok("gshow", job_id)
    assert f"account lab (a label; its use counts for {me}), queue course, QOS high" in shown
    changed = sh.type("gctl", "update", job_id, "account=other")
    assert changed.err == f"gctl: no accounts are configured, so account other is just a name; use counts for {me}\n"
    copy = sh.type("gsub", "--resubmit", job_id)
    assert "so queue course, account other and QOS high are just names" in copy.err
    sh.ok("gcancel", job_id, copy.out.split()[-1])


def test_an_unreadable_script_is_named(sh: Shell, tmp_path: Path) -> None:
    script = Path(write(tmp_path / "secret.sh", GOOD))
    script.chmod(0)
    if os.access(script, os.R_OK):
        pytest.skip("root may read everything")
    done = sh.type("gsub", str(script))
    assert (done.code, "Permission denied" in done.err) == (1, True)


def test_a_ten_megabyte_script_is_refused(sh: Shell, tmp_path: Path) -> None:
    done = sh.type("gsub", write(tmp_path / "big.sh", "#!/bin/sh\n" + "#" * (10 << 20)))
    assert done.code == 1
    assert "10.0 MiB" in done.err


def test_a_name_with_escapes_is_never_printed_raw(sh: Shell) -> None:
    name = "a\nb\x1b[31mred"
    job_id = sh.submit("-H", "-J", name, "--", "true")
    for command, *words in (("gq", job_id), ("gshow", job_id), ("gq", "-o", "%j", "-j", job_id)):
        text = sh.ok(command, *words)
        assert "\x1b" not in text
        assert "a\\nb\\x1b[31mred" in text
    assert json.loads(sh.ok("gq", "--json", job_id))["jobs"][0]["name"] == name


def test_errors_are_documents_with_json(sh: Shell) -> None:
    done = sh.type("gsub", "--json", "-g", "99", "--", "true")
    error = json.loads(done.err)["error"]
    assert (done.code, error["code"]) == (1, "refused")
    assert set(error) == {"message", "hint", "code", "about"}


def test_a_socket_without_a_daemon_is_reported_and_none_is_started(sh: Shell, tmp_path: Path) -> None:
    done = sh.type("gsub", "--", "true", GPUSCHED_SOCKET=str(tmp_path / "nothing.sock"))
    assert done.code == 1
    assert "no daemon answers" in done.err


def test_an_unwritable_home_is_reported(sh: Shell) -> None:
    done = sh.type("gsub", "--", "true", GPUSCHED_HOME="/proc/nowhere")
    assert done.code == 1
    assert "/proc/nowhere" in done.err
    assert "Traceback" not in done.err


def test_a_missing_working_folder_is_reported(sh: Shell, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    line = f'rmdir {gone}; exec "$@"'
    argv = ["/bin/sh", "-c", line, "sh", *sh.argv("gsub", "--", "true")]
    done = subprocess.run(argv, env={**sh.env, "PYTHONSAFEPATH": "1"}, cwd=gone, capture_output=True, text=True)
    assert done.returncode == 1
    assert "no longer exists" in done.stderr


@pytest.mark.parametrize(
    ("in_script", "typed", "request_"),
    [("-g a100:2", "0.5", "0.5"), ("-g 0.5", "2", "2"), ("--gres=gpu:t4:1", "1", "1")],
)
def test_a_gpu_option_on_the_command_line_replaces_all_of_the_script(
    sh: Shell, tmp_path: Path, in_script: str, typed: str, request_: str
) -> None:
    script = write(tmp_path / "job.sh", f"#!/bin/sh\n#GSUB {in_script}\ntrue\n")
    job = json.loads(sh.ok("gsub", "--json", "-H", "-g", typed, script))["job"]
    assert job["gpu_request"] == request_
    sh.ok("gcancel", job["id"])


def test_an_unreadable_variable_is_named(sh: Shell) -> None:
    for name, value in (("GSUB_TIME", "soon"), ("GSUB_COLOUR", "red"), ("GSUB_BATCH", "file")):
        done = sh.type("gsub", "--", "true", **{name: value})
        assert (done.code, name in done.err) == (2, True), done


def test_following_requires_a_single_job(sh: Shell) -> None:
    done = sh.type("gsub", "--follow", "--batch", "-", stdin=b"true\n")
    assert (done.code, "--follow" in done.err) == (2, True)


def test_closed_streams_do_no_harm(sh: Shell) -> None:
    argv = sh.argv("gsub", "--parsable", "-H", "-J", "closed", "--", "true")
    done = subprocess.run(["/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *argv], env=sh.env, cwd=sh.work)
    assert done.returncode == 0
    (job_id,) = sh.ok("gq", "--quiet", "-n", "closed").split()
    sh.ok("gcancel", job_id)


DOOMED = "can never start: depends on the success of job 1, which ended as FAILED; cancelled at once"


def test_a_job_that_can_never_start_is_submitted_with_a_note(own: Shell) -> None:
    parent = own.submit("--", "false")
    own.type("gwait", parent)
    done = own.type("gsub", "-d", f"afterok:{parent}", "--", "true")
    assert (done.code, done.out, done.err) == (0, "Submitted job 2\n", f"gsub: job 2 {DOOMED}\n")
    done = own.type("gsub", "--json", "-d", f"afterok:{parent}", "--", "true")
    assert json.loads(done.out)["notes"] == [f"job 3 {DOOMED}"]
    done = own.type("gsub", "--parsable", "-d", f"afterok:{parent}", "--batch", "-", stdin=b"true\ntrue\n")
    assert (done.out, done.err) == ("4\n5\n", f"gsub: jobs 4 and 5 {DOOMED}\n")
    write(own.work / "p.toml", f'[step.a]\nrun = "true"\ndependency = "afterok:{parent}"\n')
    done = own.type("gsub", "--dag", "p.toml")
    assert (done.code, done.err) == (0, f"gsub: step a {DOOMED}\n")
    dry = own.ok("gsub", "--dry-run", "-d", f"afterok:{parent}", "--", "true")
    assert dry.startswith("could never start: depends on the success of job 1, which ended as FAILED\n")
    held = own.submit("-H", "--", "true")
    done = own.type("gctl", "update", held, f"dependency=afterok:{parent}")
    assert done.err == f"gctl: job {held} {DOOMED}\n"


def test_json_is_one_document_whatever_else_is_asked_for(sh: Shell) -> None:
    for words in (["--wait"], ["--wait", "--parsable"], ["--parsable"], ["--wait", "--quiet", "--key", "one-document"]):
        done = sh.type("gsub", "-c", "0", "--json", *words, "--", "true")
        assert done.code == 0, words
        assert {"job", "schema_version"} <= json.loads(done.out).keys(), words
    batch = sh.type("gsub", "-c", "0", "--json", "--wait", "--parsable", "--batch", "-", stdin=b"true\ntrue\n")
    assert len(json.loads(batch.out)["ids"]) == 2


def test_cancelling_unknown_jobs_says_what_became_of_the_others(sh: Shell) -> None:
    ended = sh.submit("-c", "0", "--", "true")
    sh.ok("gwait", ended)
    held, other = (sh.submit("-c", "0", "--hold", "--", "true") for _ in range(2))
    for words, said in (
        ([ended, "99999"], "there is no job 99999; the others had already ended"),
        ([ended, held, "99999"], "there is no job 99999; the others were cancelled, or had already ended"),
        ([other, "99998", "99999"], "there are no jobs 99998 and 99999; the others were cancelled"),
        (["99998", "99999"], "there are no jobs 99998 and 99999, and no other was cancelled"),
    ):
        done = sh.type("gcancel", *words)
        assert (done.code, done.err.splitlines()[-2]) == (1, f"gcancel: error: {said}")


CHOICE = "sets CUDA_VISIBLE_DEVICES itself, and so may use GPUs that are not the job's, or find none; "


def test_a_script_that_chooses_its_gpus_is_told_so_after_the_id(sh: Shell) -> None:
    (sh.work / "own.sh").write_text("#!/bin/sh\n# CUDA_VISIBLE_DEVICES=0\nset -e\nexport CUDA_VISIBLE_DEVICES=0,1\n")
    done = sh.type("gsub", "-c", "0", "--hold", "own.sh")
    assert (done.code, done.out) == (0, f"Submitted job {done.out.split()[-1]}\n")
    assert f"gsub: line 4 of the script {CHOICE}" in done.err
    quiet = sh.type("gsub", "-c", "0", "--hold", "--parsable", "own.sh")
    assert quiet.out.strip().isdigit()
    assert CHOICE in quiet.err
    (sh.work / "own.toml").write_text('[step.a]\nrun = "CUDA_VISIBLE_DEVICES=1 python x.py"\nhold = true\n')
    assert f"gsub: step a: the command {CHOICE}" in sh.type("gsub", "--dag", "own.toml").err
    assert (
        "the value given for CUDA_VISIBLE_DEVICES has no effect"
        in sh.type("gsub", "-c", "0", "--hold", "-E", "CUDA_VISIBLE_DEVICES=1", "--", "true").err
    )
    lines = b"true\nCUDA_VISIBLE_DEVICES=1 python x.py\n"
    assert f"gsub: the command {CHOICE}" in sh.type("gsub", "-c", "0", "--hold", "--batch", "-", stdin=lines).err
    assert sh.type("gsub", "-c", "0", "--hold", "--wrap", "echo $CUDA_VISIBLE_DEVICES").err == ""


def test_what_is_accepted_and_probably_not_meant_is_said(sh: Shell) -> None:
    hold = ("gsub", "-c", "0", "--hold")
    done = sh.type(*hold, "--begin", "2020-01-01", "--", "true")
    assert (done.code, done.out.startswith("Submitted job ")) == (0, True)
    assert re.fullmatch(
        r"gsub: the begin that was asked for passed about \d+ days ago, so it delays nothing\n", done.err
    )
    assert sh.type(*hold, "--begin", "now", "--", "true").err == ""
    done = sh.type(*hold, "-a", "1,1,1", "--", "true")
    assert done.err == (
        "gsub: the array names 3 tasks, some more than once, and has 1 task; for the same work several times: -a 0-2\n"
    )
    assert sh.type(*hold, "-a", "1,3-5", "--", "true").err == ""
    note = f"gsub: there is no folder {sh.work}/none here; the job fails unless there is one where and when it starts\n"
    assert sh.type(*hold, "-D", "none", "--", "true").err == note
    (sh.work / "none.toml").write_text('[step.a]\nrun = "true"\nhold = true\nchdir = "none"\nbegin = "2020-01-01"\n')
    done = sh.type("gsub", "--dag", "none.toml")
    assert note in done.err
    assert "gsub: step a: the begin that was asked for passed about " in done.err
    job = sh.submit("-c", "0", "--hold", "--", "true")
    changed = sh.type("gctl", "update", job, "begin=2020-01-01")
    assert (changed.code, "so it delays nothing" in changed.err) == (0, True)


@pytest.mark.parametrize(
    "words", [("-E", "A B=1"), ("-E", "1A=1"), ("-E", "a-b=1"), ("--export", "ALL,A B=1"), ("-E", "\u00e4=1")]
)
def test_variables_that_no_shell_can_read_are_refused(sh: Shell, words: tuple[str, str]) -> None:
    done = sh.type("gsub", *words, "--", "true")
    assert (done.code, done.out) == (2, "")
    assert "is not the name of a variable: letters, digits and _" in done.err
