"""gctl suspend, resume and requeue as users type them."""

from __future__ import annotations

import json
from typing import Any

from shell import Shell
from support import wait_until
from test_terminals import on_terminal


def shown(sh: Shell, job_id: str) -> dict[str, Any]:
    return dict(json.loads(sh.ok("gshow", "--json", job_id))["jobs"][0])


def state(sh: Shell, job_id: str) -> str:
    return str(shown(sh, job_id)["state"])


def sleeper(sh: Shell, *words: str) -> str:
    job_id = sh.submit("-c", "0", *words, "--", "sleep", "1000")
    wait_until(lambda: state(sh, job_id) == "RUNNING", what="the job to run")
    return job_id


def test_a_job_stays_suspended_until_it_is_resumed(sh: Shell) -> None:
    job_id = sleeper(sh)
    assert sh.ok("gctl", "suspend", job_id) == f"suspended {job_id}\n"
    (line,) = (line for line in sh.ok("gq", "--me", "--long").splitlines() if line.split()[0] == job_id)
    assert line.split()[3] == "S"
    assert f"resume it with: gctl resume {job_id}" in line
    assert sh.type("gctl", "suspend", job_id).err == f"gctl: {job_id} was already suspended\n"
    waited = sh.type("gwait", "--timeout", "1s", job_id)
    assert (waited.code, job_id in waited.err) == (1, True)
    assert sh.ok("gctl", "resume", job_id) == f"resumed {job_id}\n"
    assert state(sh, job_id) == "RUNNING"
    assert sh.type("gctl", "resume", job_id).err == f"gctl: {job_id} was not suspended\n"
    story = [event["text"] for event in shown(sh, job_id)["events"]]
    assert any(text.startswith("suspended by ") for text in story)
    assert any(text.startswith("resumed by ") for text in story)
    sh.ok("gcancel", job_id)


def test_a_suspended_job_that_keeps_its_gpus_says_so(own: Shell) -> None:
    job_id = sleeper(own, "-g", "2")
    done = own.type("gctl", "suspend", job_id)
    assert done.out == f"suspended {job_id}\n"
    assert done.err == f"gctl: {job_id} keeps its 2 GPUs while suspended; to free them: gctl requeue {job_id}\n"
    waiting = own.submit("-g", "1", "--", "true")
    assert state(own, waiting) == "PENDING"
    own.ok("gctl", "requeue", job_id)
    wait_until(lambda: state(own, waiting) in ("RUNNING", "COMPLETED") or state(own, job_id) == "RUNNING", what="it")
    own.ok("gcancel", job_id)


def test_json_and_quiet_suit_scripts(sh: Shell) -> None:
    job_id = sleeper(sh)
    answer = json.loads(sh.ok("gctl", "--json", "suspend", job_id))
    assert (answer["changed"], answer["unchanged"], answer["kept"]) == ([job_id], [], [])
    assert shown(sh, job_id)["suspended_at"] is not None
    assert sh.ok("gctl", "--quiet", "resume", job_id) == f"{job_id}\n"
    assert sh.ok("gctl", "--quiet", "requeue", job_id) == f"{job_id}\n"
    wait_until(lambda: shown(sh, job_id)["run"] == 2, what="the second run")
    sh.ok("gcancel", job_id)


def test_impossible_actions_are_refused_with_an_alternative(sh: Shell) -> None:
    held = sh.submit("-H", "--", "true")
    once = sleeper(sh, "--no-requeue")
    for action, job_id, says, hint in (
        ("suspend", held, "is PENDING", f"gctl hold {held}"),
        ("resume", held, "is PENDING, not suspended", f"gq --why {held}"),
        ("requeue", held, "it is already pending", f"gq --why {held}"),
        ("requeue", once, "--no-requeue", f"gcancel {once}"),
        ("suspend", "99999", "there is no job 99999", "gq -a"),
    ):
        done = sh.type("gctl", action, job_id)
        assert done.code == 1, done
        assert says in done.err
        assert hint in done.err
        assert done.out == ""
    sh.ok("gcancel", held, once)


def test_an_update_of_a_running_job_names_the_command_that_works(own: Shell) -> None:
    job_id, once = sleeper(own), sleeper(own, "--no-requeue")
    done = own.type("gctl", "update", job_id, "begin=now+1h")
    assert f"begin of job {job_id} cannot change while it is RUNNING" in done.err
    assert f"gctl requeue --hold {job_id}, then gctl update {job_id} begin=..., then gctl release {job_id}" in done.err
    assert "gpus of job" in own.type("gctl", "update", job_id, "gpus=0.5").err
    own.ok("gctl", "requeue", "--hold", job_id)
    wait_until(lambda: state(own, job_id) == "PENDING", what="the run to end")
    own.ok("gctl", "update", job_id, "begin=now+1h")
    own.ok("gctl", "release", job_id)
    assert f"gcancel {once}" in own.type("gctl", "update", once, "begin=now+1h").err


def test_hold_of_a_running_job_says_that_it_keeps_running(own: Shell) -> None:
    job_id = sleeper(own)
    done = own.type("gctl", "hold", job_id)
    assert done.out == f"held {job_id}\n"
    assert f"{job_id} keeps running until its run ends" in done.err
    assert f"gctl requeue --hold {job_id}, or gctl suspend {job_id}" in done.err
    assert state(own, job_id) == "RUNNING"
    own.ok("gctl", "release", job_id)
    assert own.ok("gctl", "requeue", "--hold", job_id) == f"requeued and held {job_id}\n"
    wait_until(lambda: state(own, job_id) == "PENDING", what="the run to end")
    assert shown(own, job_id)["reason"] == "JobHeldUser"
    once = sleeper(own, "--no-requeue")
    refused = own.type("gctl", "hold", once)
    assert (refused.code, f"gctl suspend {once}" in refused.err) == (1, True)


def test_hold_and_release_by_filter_ask_for_confirmation(own: Shell) -> None:
    one, other = (own.submit("-H", "-J", name, "--", "true") for name in ("a", "b"))
    many = own.type("gsub", "--parsable", "-H", "-J", "a", "--batch", "-", stdin=b"true\n" * 20).out.split()
    asked = on_terminal(own, "gctl", "release", "-n", "a", answer="n\n")
    assert asked.code == 1
    assert f"release {one},{many[0]}-{many[-1]} (21 jobs)? [y/N]" in asked.out
    assert "nothing was released" in asked.out
    assert {shown(own, job_id)["hold"] for job_id in (one, other)} == {"user"}
    assert own.ok("gctl", "release", "-n", "b", "--quiet").split() == [other]
    own.ok("gwait", other)
    assert own.ok("gctl", "hold", "--all", "-t", "RUNNING") == ""
    assert own.type("gctl", "hold", "--all").err.endswith("no job matches\n")
    assert on_terminal(own, "gctl", "release", "-y", "--all").code == 0
    assert own.type("gctl", "release", "--me").err.endswith("no job matches\n")
    for words in (["suspend", "--all"], ["hold", "--all", one], ["hold", "--hold", one], ["drain", "-y", "0"]):
        assert own.type("gctl", *words).code == 2, words
