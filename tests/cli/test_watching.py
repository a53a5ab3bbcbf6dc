"""gq, gcancel, gwait, glogs, gshow, ginfo, ghist, gctl: what people see and what scripts parse."""

from __future__ import annotations

import json
import os
import pwd
import re
import shlex
import subprocess
import time
from pathlib import Path

import pytest
from shell import Shell, compare
from support import wait_until

from gpusched.cli.actions import ACTIONS
from gpusched.cli.help import MOST_USED, help_text
from gpusched.cli.options import TABLES
from gpusched.model.state_names import COMPACT
from gpusched.model.states import JobState

JOB_KEYS = set(
    "id name user account queue state reason reason_text priority submit_at eligible_at start_at end_at time_limit_s "
    "exit_code signal node gpus cpus mem_mib work_dir stdout_path stderr_path run".split()
)
GPU_KEYS = set(
    "node index uuid name state vram_total_mib vram_used_mib vram_booked_mib utilisation temperature_c jobs "
    "foreign".split()
)


def job_of(sh: Shell, job_id: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(sh.ok("gshow", "--json", job_id))["jobs"][0]
    return found


def running(sh: Shell, *words: str) -> str:
    job_id = sh.submit(*words, "--", "sleep", "1000")
    wait_until(lambda: bool(job_of(sh, job_id)["runs"]), what="the job to start")
    return job_id


def tidy(text: str) -> str:
    """Times, paths, ids of processes and users are not what a golden is about."""
    text = re.sub(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d", "<TIME>", text)
    text = re.sub(r"\b\d+:\d\d\b", "M:SS", text)
    text = re.sub(r"/\S+/(\S+)", r"<DIR>/\1", text)
    text = re.sub(r"CPU [\d.]+ of (\d+)  memory \d+M", r"CPU <N> of \1  memory <MIB>", text)
    text = re.sub(r"(use|memory) \|[^|]*\| (mean|peak)", r"\1 \2", text)
    text = re.sub(r"CPU time [\d.]+ s, peak memory \d+M", "CPU time <S>, peak memory <MIB>", text)
    return re.sub(rf"\b{re.escape(pwd.getpwuid(os.geteuid()).pw_name)}\b", "user", text)


@pytest.mark.parametrize("command", sorted(TABLES))
def test_help_starts_with_an_example_and_keeps_its_text(sh: Shell, command: str) -> None:
    text = sh.ok(command, "--help")
    assert text.splitlines()[2].startswith(f"  example: {command}")
    assert text == help_text(TABLES[command]())
    assert max(map(len, text.splitlines())) <= 120
    compare(f"help-{command}.txt", text)


@pytest.mark.parametrize("command", sorted(MOST_USED))
def test_help_shows_what_most_people_need_and_all_the_rest_by_topic(sh: Shell, command: str) -> None:
    whole = sh.ok(command, "--help", "all")
    compare(f"help-{command}-all.txt", whole)
    first = sh.ok(command, "--help")
    topics = re.findall(r"^  ([a-z]+) ", first.partition("--help TOPIC:\n")[2], re.MULTILINE)
    assert len(topics) >= 5
    assert len(first.splitlines()) < 0.45 * len(whole.splitlines())
    shown = first + "".join(sh.ok(command, "--help", topic) for topic in topics)
    missing = [line for line in whole.splitlines() if line.startswith("  -") and line not in shown]
    assert command == "gctl" or not missing, "every option is at least under its topic"
    for action in ACTIONS.values() if command == "gctl" else ():
        assert f"  {action.name} " in shown


def test_help_about_one_option_or_a_word_that_is_none(sh: Shell) -> None:
    assert sh.ok("gsub", "--help", "deadline").startswith("  --deadline WHEN ")
    assert sh.ok("gsub", "-h", "t") == sh.ok("gsub", "--help", "time")
    done = sh.type("gsub", "--help", "colour")
    assert (done.code, done.out) == (2, "")
    assert "no help about 'colour'" in done.err
    assert "topics: run, resources" in done.err
    done = sh.type("gsub", "--deadline", "soon", "--", "true")
    assert "see: gsub --help deadline" in done.err


@pytest.mark.parametrize("command", [*sorted(TABLES), "gpusched"])
def test_version_is_printed_and_unknown_options_are_refused(sh: Shell, command: str) -> None:
    done = sh.type(command, "--colour")
    assert done.code == 2, done
    assert "--colour" in done.err
    assert "Traceback" not in done.err
    assert re.fullmatch(rf"{command} \d+\.\d+\.\d+\n", sh.ok(command, "--version"))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_printed(sh: Shell, shell: str) -> None:
    assert "_GSUB_COMPLETE" in sh.ok("gsub", "--completion", shell)


def test_completion_knows_the_options_of_the_table(sh: Shell) -> None:
    env = {"_GSUB_COMPLETE": "bash_complete", "COMP_WORDS": "gsub --retr", "COMP_CWORD": "1"}
    words = [line.partition(",")[2] for line in sh.ok("gsub", **env).splitlines()]
    assert words == ["--retries", "--retry-on"]


def test_every_state_has_a_short_form() -> None:
    assert list(COMPACT) == [state.value for state in JobState]


def test_gq_shows_running_jobs_and_reasons_of_pending_ones(own: Shell) -> None:
    first = running(own, "-J", "wide", "-g", "2")
    second = own.submit("-J", "narrow", "-g", "1", "-t", "1h", "--", "true")
    held = own.submit("-H", "-J", "held", "--", "true")
    text = own.ok("gq")
    assert [line.split()[:2] for line in text.splitlines()[1:]] == [[first, "wide"], [second, "narrow"], [held, "held"]]
    user = text.splitlines()[1].split()[2]
    compare("gq.txt", re.sub(" +", " ", tidy(text)))
    why = re.sub(r"until \S+;", "until <INSTANT>;", own.ok("gq", "--why", second))
    compare("gq-why.txt", tidy(why))
    places = re.sub(r"(\d{4}-\d\d-\d\dT)?(?<![\d:])\d\d:\d\d(?!:)", "<INSTANT>", own.ok("gq", "--priority"))
    compare("gq-priority.txt", re.sub(" +", " ", re.sub(r"\d+\.\d+", "N", tidy(places))))
    assert own.ok("gq", "--quiet", "-s", "PD").split() == [second, held]
    assert (
        own.ok("gq", "--noheader", "-o", "%i|%T|%r|%.4j|%4u<", "-j", held)
        == f"{held}|PENDING|JobHeldUser|held|{user[:4]:4}<\n"
    )
    assert own.ok("gq", "-n", "narrow", "--sort", "-id", "--noheader").split()[0] == second


def test_gq_json_has_the_keys_that_scripts_use(sh: Shell) -> None:
    job_id = sh.submit("-H", "--", "true")
    document = json.loads(sh.ok("gq", "--json", "-j", job_id))
    assert document["schema_version"] == 1
    (job,) = document["jobs"]
    assert set(job) >= JOB_KEYS
    assert (job["id"], job["state"], job["reason"], job["start_at"]) == (job_id, "PENDING", "JobHeldUser", None)
    shown = json.loads(sh.ok("gshow", "--json", job_id))["jobs"][0]
    assert set(shown) >= JOB_KEYS | {"runs", "events"}
    sh.ok("gcancel", job_id)


def test_gq_reports_an_unknown_job(sh: Shell) -> None:
    for words in (["-j", "99999"], ["--why", "99999"]):
        done = sh.type("gq", *words)
        assert (done.code, done.out) == (1, "")
        assert "there is no job 99999" in done.err
    assert sh.type("gq", "-s", "SLEEPING").code == 2
    assert sh.type("gq", "abc").code == 2


def test_unknown_users_and_queues_are_named(sh: Shell) -> None:
    for command, *words in (
        ("gq",),
        ("gq", "--json"),
        ("ghist",),
        ("ghist", "--usage"),
        ("gcancel",),
        ("gctl", "hold"),
    ):
        for option, what in (("-u", "user"), ("-q", "queue")):
            done = sh.type(command, *words, option, "nobody2")
            assert (done.code, done.out) == (1, ""), (command, words, option)
            assert f"there is no {what} " in done.err
            assert "nobody2" in done.err
    user = pwd.getpwuid(os.geteuid()).pw_name
    assert sh.type("gq", "-u", user, "-q", "default").code == 0


def test_an_unconfigured_queue_is_accepted_with_a_note(sh: Shell) -> None:
    done = sh.type("gsub", "-H", "-p", "gpuu", "--parsable", "--", "true")
    job_id = done.out.strip()
    assert done.err == "gsub: no queues are configured, so queue gpuu is just a name\n"
    assert sh.ok("gq", "--quiet", "-q", "gpuu").split() == [job_id]
    done = sh.type("gctl", "update", job_id, "queue=other")
    assert done.err == "gctl: no queues are configured, so queue other is just a name\n"
    assert sh.type("gctl", "update", job_id, "queue=default").err == ""
    sh.ok("gcancel", job_id)
    assert sh.type("gq", "-a", "-q", "default").code == 0


def test_a_closed_pipe_is_not_an_error(sh: Shell) -> None:
    line = shlex.join(sh.argv("gq", "-a"))
    done = subprocess.run(["/bin/sh", "-c", f"{line} | true"], env=sh.env, cwd=sh.work, capture_output=True)
    assert done.stderr == b""


def test_gcancel_ends_jobs_by_id_and_by_filter(sh: Shell) -> None:
    first, second = (sh.submit("-H", "-J", "gone", "--", "true") for _ in range(2))
    keep = sh.submit("-H", "-J", "stays", "--", "true")
    assert sh.type("gcancel", first).out == ""
    assert sh.ok("gcancel", "--quiet", "-n", "gone").split() == [second]
    assert [job_of(sh, job_id)["state"] for job_id in (first, second, keep)] == ["CANCELLED", "CANCELLED", "PENDING"]
    done = sh.type("gcancel", first)
    assert (done.code, "had already ended" in done.err) == (0, True)
    assert sh.type("gcancel").code == 2
    assert sh.type("gcancel", "99999").code == 1
    assert sh.type("gcancel", "-s", "HUGE", keep).code == 2
    refused = sh.type("gcancel", "-s", "USR1", keep)
    assert (refused.code, "no process to signal" in refused.err) == (1, True)
    sh.ok("gcancel", keep)


def test_gcancel_signals_a_running_job(sh: Shell) -> None:
    script = "trap 'exit 5' USR1; echo ready; while :; do sleep 0.02; done"
    job_id = sh.submit("-o", "out", "--wrap", script)
    wait_until(lambda: (sh.work / "out").exists() and "ready" in (sh.work / "out").read_text(), what="the trap")
    assert sh.ok("gcancel", "-s", "SIGUSR1", "-b", "--quiet", job_id).split() == [job_id]
    assert sh.type("gwait", job_id).code == 1
    assert job_of(sh, job_id)["exit_code"] == 5


def test_gwait_waits_and_honours_its_timeout(sh: Shell) -> None:
    good, slow = sh.submit("--", "true"), running(sh)
    assert sh.type("gwait", good).code == 0
    done = sh.type("gwait", "--timeout", "1s", good, slow)
    assert (done.code, f"still unfinished: {slow}" in done.err) == (1, True)
    assert sh.type("gwait", "99999").code == 1
    assert sh.type("gwait").code == 2
    sh.ok("gcancel", slow)
    done = sh.type("gwait", "--json", slow)
    assert json.loads(done.out)["jobs"][0]["state"] == "CANCELLED"


def test_at_means_the_last_job(sh: Shell) -> None:
    job_id = sh.submit("-H", "--", "true")
    assert json.loads(sh.ok("gshow", "--json", "@"))["jobs"][0]["id"] == job_id
    sh.ok("gcancel", "@")


def test_glogs_prints_the_tail_and_each_run(sh: Shell) -> None:
    script = 'n=$SLURM_RESTART_COUNT; seq 5; echo "run ${n:-0}"; [ "${n:-0}" = 1 ]'
    job_id = sh.submit("--retries", "1", "--backoff", "0", "--wrap", script)
    sh.ok("gwait", job_id)
    assert sh.ok("glogs", job_id).splitlines() == ["1", "2", "3", "4", "5", "run 1"]
    assert sh.ok("glogs", "-n", "2", job_id).splitlines() == ["5", "run 1"]
    assert sh.ok("glogs", "-n", "0", job_id) == ""
    assert sh.ok("glogs", "--run", "1", "-n", "1", job_id) == "run 0\n"
    assert sh.type("glogs", "--run", "9", job_id).code == 1
    Path(str(job_of(sh, job_id)["stdout_path"])).unlink()
    done = sh.type("glogs", job_id)
    assert (done.code, "moved or removed" in done.err) == (1, True)


def test_glogs_follows_a_pending_job_through_a_retry(sh: Shell) -> None:
    script = 'n=${SLURM_RESTART_COUNT:-0}; echo "run $n"; [ $n = 1 ]'
    job_id = sh.submit("-H", "--retries", "1", "--backoff", "0", "--wrap", script)
    following = subprocess.Popen(
        sh.argv("glogs", "-f", job_id), env=sh.env, cwd=sh.work, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    sh.ok("gctl", "release", job_id)
    out, err = following.communicate(timeout=60)
    assert out.decode().splitlines() == ["run 0", "run 1"]
    assert following.returncode == 0
    assert "run 2 started" in err.decode()


def as_of_one_reading(text: str) -> str:
    """Energy is what was used between two readings: a run that was read once more before it ended has some."""
    text = text.replace("  30 W   idle 0 min\n", "  n/a W\n")
    return re.sub(r", energy [\d.]+ Wh$", "", re.sub(r"[\d.]+ Wh \(power\)", "energy n/a", text), flags=re.MULTILINE)


def test_gshow_shows_the_whole_history(own: Shell) -> None:
    (own.work / "wait.sh").write_text("until [ -e over ]; do sleep 0.05; done\n")
    own.submit("-J", "story", "-g", "1", "-t", "1h", "-m", "2G", "--", "sh", "wait.sh")
    # A run that ends before the GPU is read has no figures of it.
    wait_until(lambda: "use mean" in tidy(own.ok("gshow", "1")), what="the GPU of the run to be read")
    (own.work / "over").touch()
    own.ok("gwait", "1")
    compare("gshow.txt", as_of_one_reading(tidy(own.ok("gshow", "1"))))
    own.ok("gsub", "-W", "--quiet", "--wrap", "echo wrapped")
    assert own.ok("gshow", "--script", "2") == "#!/bin/sh\necho wrapped\n"
    assert own.ok("gshow", "--script", "1") == "sh wait.sh\n"


def test_ginfo_counts_bookings_of_unified_memory_once(own: Shell, tmp_path: Path) -> None:
    cards = tmp_path / "cards.json"
    cards.write_text(json.dumps({"gpus": [{"name": "GB10", "vram": "24GiB", "unified_memory": True}]}))
    own.env["GPUSCHED_FAKE_GPUS"] = str(cards)
    running(own, "--vram", "1G", "-m", "64M")
    document = json.loads(own.ok("ginfo", "--json"))
    (node,), (gpu,) = document["nodes"], document["gpus"]
    assert (gpu["unified_memory"], gpu["vram_booked_mib"], node["mem_booked_mib"]) == (True, 1024, 1024 + 64)
    assert "GPU 0 uses the host's memory: GPU memory booked there counts as host memory" in own.ok("ginfo")


def test_ginfo_shows_bookings_drains_and_foreign_processes(own: Shell, tmp_path: Path) -> None:
    cards = tmp_path / "cards.json"
    stranger = {"pid": 1, "vram": "20GiB", "user": "bob", "name": "python"}
    gpu = {"name": "A100", "vram": "80GiB"}
    linked = {**gpu, "link_group": 0, "numa": 1}
    cards.write_text(json.dumps({"gpus": [linked, {**linked, "processes": [stranger]}, gpu]}))
    own.env["GPUSCHED_FAKE_GPUS"] = str(cards)
    job_id = running(own, "-g", "1")
    own.ok("gctl", "drain", "2", "-m", "fan is broken")
    document = json.loads(own.ok("ginfo", "--json"))
    assert set(document) >= {"schema_version", "nodes", "gpus", "queues"}
    assert all(set(card) >= GPU_KEYS for card in document["gpus"])
    first, second, third = document["gpus"]
    assert [(card["link_group"], card["numa"]) for card in document["gpus"]] == [(0, 1), (0, 1), (None, None)]
    assert (first["state"], first["jobs"], first["vram_booked_mib"]) == ("allocated", [job_id], 81920)
    assert [(process["pid"], process["user"], process["vram_mib"]) for process in second["foreign"]] == [
        (1, "bob", 20480)
    ]
    assert (third["state"], third["why"]) == ("drained", "fan is broken")
    text = own.ok("ginfo")
    assert "processes on GPUs without a booking:" in text
    assert "bob" in text
    waiting = own.submit("-g", "1", "--", "true")
    why = own.ok("gq", "--why", waiting)
    assert "Resources" in why or "ReqNodeNotAvail" in why
    own.ok("gctl", "undrain", "2")
    assert own.type("gwait", waiting).code == 0
    assert own.type("gctl", "drain", "nowhere").code == 1


def test_ghist_lists_sums_and_csv(own: Shell) -> None:
    own.ok("gsub", "-W", "--quiet", "-g", "1", "-J", "one", "--", "sleep", "0.2")
    own.type("gsub", "-W", "--quiet", "-J", "two", "--wrap", "exit 3")
    lines = own.ok("ghist").splitlines()
    assert [line.split()[1:5] for line in lines[1:]] == [
        ["two", lines[1].split()[2], "F", "3"],
        ["one", lines[2].split()[2], "CD", "0"],
    ]
    assert own.ok("ghist", "--csv").splitlines()[0] == "id,name,user,st,exit,runs,elapsed,gpus,ended,reason"
    usage = json.loads(own.ok("ghist", "--usage", "--json"))["usage"]
    assert (usage[0]["jobs"], usage[0]["runs"]) == (2, 2)
    assert 0.2 / 3600 <= usage[0]["gpu_hours"] < 1
    assert own.ok("ghist", "--efficiency").splitlines()[2].split()[1] == "one"
    assert own.ok("ghist", "--quiet", "-s", "FAILED").split() == ["2"]
    assert own.ok("ghist", "--quiet", "--since", "2001-01-01").split() == ["1", "2"]
    tomorrow = time.strftime("%Y-%m-%d", time.localtime(time.time() + 86400))
    assert own.ok("ghist", "--quiet", "--since", tomorrow) == ""
    assert own.type("ghist", "--since", "whenever").code == 2


def test_gctl_holds_releases_and_updates(sh: Shell) -> None:
    job_id = sh.submit("-H", "--", "true")
    assert sh.ok("gctl", "update", job_id, "time=2h", "nice=5", "gpus=0.5", "name=new") == f"updated {job_id}\n"
    job = job_of(sh, job_id)
    assert (job["time_limit_s"], job["nice"], job["gpu_request"], job["name"]) == (7200, 5, "0.5", "new")
    sh.ok("gctl", "update", job_id, "gpus=2", "time=")
    job = job_of(sh, job_id)
    assert (job["time_limit_s"], job["gpu_request"]) == (None, "2")
    for words, code in (
        ([], 2),
        (["fly", job_id], 2),
        (["update", job_id], 2),
        (["update", job_id, "colour=red"], 2),
        (["update", job_id, "time=soon"], 2),
        (["update", job_id, "gpus=99"], 1),
        (["update", job_id, "cpus=lots"], 2),
        (["hold", "99999"], 1),
        (["hold"], 2),
        (["release", "-m", "x", job_id], 2),
    ):
        done = sh.type("gctl", *words)
        assert (done.code, "Traceback" in done.err) == (code, False), (words, done)
    assert sh.ok("gctl", "release", job_id) == f"released {job_id}\n"
    sh.type("gwait", job_id)


def test_gpusched_reports_its_daemon_and_settings(own: Shell) -> None:
    assert own.type("gpusched", "daemon", "status").code == 1
    assert own.ok("gpusched", "daemon", "stop") == "not running\n"
    assert own.ok("gpusched", "daemon", "start") == "started\n"
    assert own.ok("gpusched", "daemon", "start") == "already running\n"
    assert json.loads(own.ok("gpusched", "daemon", "status", "--json"))["daemon"]["gpu_source"] == "simulated"
    assert "database:" in own.ok("gpusched", "daemon", "status")
    assert "ok   daemon" in own.ok("gpusched", "doctor")
    assert "node.cpus" in own.ok("gpusched", "config", "show")
    assert "is fine" in own.ok("gpusched", "config", "check")
    assert json.loads(own.ok("gpusched", "debug", "snapshot"))["snapshot"]["nodes"][0]["name"] == "lab1"
    (own.home / "config.toml").write_text("[node]\ncpus = -1\n")
    for words in (["config", "check"], ["config", "show"]):
        done = own.type("gpusched", *words)
        assert (done.code, "cpus" in done.err, "Traceback" in done.err) == (2, True, False), done
    done = own.type("gpusched", "doctor")
    assert (done.code, "FAIL config" in done.out) == (1, True)
    (own.home / "config.toml").write_text("")
    assert own.ok("gpusched", "daemon", "stop") == "stopped; jobs keep running\n"


def test_the_demo_runs_a_job_to_completion(sh: Shell) -> None:
    done = sh.type("gpusched", "demo", GPUSCHED_FAKE_GPUS="")
    assert done.code == 0, done
    assert "SIMULATED" in done.out or "NVIDIA" in done.out
    assert "training step 3 of 3" in done.out
    assert "CUDA_VISIBLE_DEVICES=0" in done.out
