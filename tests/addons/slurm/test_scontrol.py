"""scontrol as people and tools type it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from attacks import as_user
from golden_cases import Places, cases, check, check_table
from hypothesis import given
from hypothesis import strategies as st
from people import ANN, BOB, NEEDS_ROOT, SystemDaemon
from slurm_lab import SlurmLab
from support import wait_until

from gpusched.addons.slurm import scontrol
from gpusched.addons.slurm.command import run
from gpusched.addons.slurm.scontrol_job import JOB_KEYS, JobSurroundings, job_lines
from gpusched.addons.slurm.scontrol_steps import distribution
from gpusched.api.visibility import MASKED
from gpusched.model.hostlist import expand_all, fold

_ALONE = "the one user of a personal daemon may do this: he is its admin, and stands for bob as well"
_FREE = "jobs that do not ask for memory book none, where Slurm books all of it until they start"
_EARLY = "starts are forecast for all jobs, where Slurm plans only the first of the queue"
DIFFERS = {
    "135-scontrol-show-job-d": "which cores a job has is known only with [isolation] pin_cpus",
    "136-scontrol-show-job-pending": f"{_ALONE}; {_FREE}",
    "137-scontrol-show-job-dep": f"{_FREE}; {_EARLY}",
    "138-scontrol-show-job-array": f"{_FREE}; {_EARLY}; the output of a whole array keeps its %a",
    "139-scontrol-show-jobid-task": f"{_FREE}; {_EARLY}",
    "142-scontrol-show-node": "the address is the name; when the last job ended is not kept",
    "143-scontrol-show-node-d": "the address is the name; when the last job ended is not kept",
    "149-scontrol-write-script": "the capture had another job.sh; see the test of scripts",
    "153-scontrol-update-time-up": _ALONE,
    "158-scontrol-update-others": _ALONE,
    "162-scontrol-suspend-user": "an owner may suspend his own job",
    "167-scontrol-user-drain": _ALONE,
    "168-scontrol-show-config": "only the keys that have a true value here",
    "170-scontrol-show-steps": "job 30, just released, has started on the core that was left",
    "181-scontrol-show-res-2": "a reserved node is reserved with its GPUs",
    "182-scontrol-create-res-user": _ALONE,
}
_PLAYED = [one for one in cases("scontrol") if int(one.name[:3]) < 200]
_MASK = (
    *(r"Priority=(\d+)", r"RunTime=(\S+)", r"AllocNode:Sid=(\S+)", r"slurm-(\d+)", r"CPULoad=(\S+)", r"OS=(.*)"),
    *(r"FreeMem=(\d+)", r"LastSchedEval=(Unknown|<[^>]+>)", r"(?m)^(\d+) +\S+ +batch"),
    r"afterok:(\d+)\(",
)


def test_agrees_with_slurm_command_by_command(own_lab: SlurmLab) -> None:
    """The golden commands in their order, each on what the ones before have left."""
    lab = own_lab
    jobs = lab.submit_golden_queue()
    jobs[4] = lab.submit("job.sh")
    check_table("scontrol", DIFFERS, _PLAYED)
    wrong = []
    for one in _PLAYED:
        # A count that is an id of the golden machine as well is none.
        known = {golden: ours for golden, ours in jobs.items() if golden != 4 or "batch_script" in one.command}
        if one.name.startswith("182"):
            lab.ok("scontrol delete ReservationName=class")
            lab.ok("scontrol create reservation ReservationName=class StartTime=now+9hours Duration=60 Users=bob")
        try:
            check(lab, one, DIFFERS, Places(jobs=known, mask=_MASK, is_blind_to_width="listpids" in one.command))
        except AssertionError as error:
            wrong.append(f"{one.name}: {error}")
    assert not wrong, "\n\n".join(wrong)


def gsub(lab: SlurmLab, words: str) -> str:
    return lab.ok(f"gsub --parsable {words}").strip()


def shown(lab: SlurmLab, words: str) -> dict[str, str]:
    """The keys and values of one entry, as clients split them: at blanks and at the first `=`."""
    return dict(word.split("=", 1) for word in lab.ok(f"scontrol -o show {words}").split())


@pytest.fixture
def waiting(lab: SlurmLab) -> str:
    """A pending job."""
    return gsub(lab, "--hold -t 1h -J waiting --wrap true")


# --- host lists -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu[01-03,7]", "gpu01 gpu02 gpu03 gpu7"),
        ("lab1", "lab1"),
        ("a[1-2]b[0-1]", "a1b0 a1b1 a2b0 a2b1"),
        ("n,n", "n n"),
        ("n[8-11]-ib", "n8-ib n9-ib n10-ib n11-ib"),
    ],
)
def test_hostnames_lists_one_a_line(lab: SlurmLab, text: str, names: str) -> None:
    assert lab.ok(f"scontrol show hostnames '{text}'").split() == names.split()


def test_hostnames_needs_no_daemon_and_takes_the_list_of_the_job(lab: SlurmLab) -> None:
    nowhere = {"GPUSCHED_SOCKET": "/nonexistent/socket"}
    assert lab.ok("scontrol show hostnames", SLURM_JOB_NODELIST="n[1-2]", SLURM_NODELIST="old", **nowhere) == "n1\nn2\n"
    assert lab.ok("scontrol show hostname", SLURM_NODELIST="n3", **nowhere) == "n3\n"
    assert lab.ok("scontrol show hostnames $SLURM_NODELIST | head -n 1", SLURM_NODELIST="n[3-9]", **nowhere) == "n3\n"
    done = lab.type("scontrol show hostnames", **nowhere)
    assert (done.code, done.out) == (1, "")
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize("text", ["gpu[1", "gpu]1[", "gpu[3-1]", "gpu[a-b]", ",", "gpu[1-99999]"])
def test_a_host_list_that_is_none_is_refused(lab: SlurmLab, text: str) -> None:
    done = lab.type(f"scontrol show hostnames '{text}'")
    assert (done.code, done.out, done.err) == (1, "", f"Invalid hostlist: {text}\n")


def test_hostlist_folds_and_hostlistsorted_sorts(lab: SlurmLab) -> None:
    assert lab.ok("scontrol show hostlist gpu01,gpu02,gpu04") == "gpu[01-02,04]\n"
    assert lab.ok("scontrol show hostlist b2,a3,a1") == "b2,a[3,1]\n"
    assert lab.ok("scontrol show hostlistsorted b2,a3,a1,a2,a10") == "a[1-3,10],b2\n"
    (lab.work / "hosts").write_text("n1\nn2\n\nn3\n")
    assert lab.ok(f"scontrol show hostlist {lab.work}/hosts") == "n[1-3]\n"


_NAME = st.from_regex(r"[a-z]{0,3}[a-z-]?[0-9]{0,12}", fullmatch=True).filter(lambda name: name.strip("-"))


@given(st.lists(_NAME, min_size=1, max_size=40))
def test_folding_keeps_every_name_in_its_place(names: list[str]) -> None:
    assert expand_all(fold(names)) == names


@given(st.lists(st.integers(0, 300), min_size=1, max_size=60), st.integers(0, 4))
def test_numbers_of_any_width_fold_and_expand(numbers: list[int], width: int) -> None:
    names = [f"gpu{number:0{width}}" for number in numbers]
    folded = fold(names)
    assert expand_all(folded) == names
    assert folded.count("gpu") == 1
    assert len(fold(sorted(set(names)))) <= len(",".join(sorted(set(names))))


# --- show job -------------------------------------------------------------------------------------

KEYS = (
    "JobId JobName UserId GroupId MCS_label Priority Nice Account QOS JobState Reason Dependency Requeue Restarts "
    "BatchFlag Reboot ExitCode RunTime TimeLimit TimeMin SubmitTime EligibleTime AccrueTime StartTime EndTime Deadline "
    "SuspendTime SecsPreSuspend LastSchedEval Scheduler Partition AllocNode:Sid ReqNodeList ExcNodeList NodeList "
    "NumNodes NumCPUs NumTasks CPUs/Task ReqB:S:C:T TRES Socks/Node NtasksPerN:B:S:C CoreSpec MinCPUsNode "
    "MinMemoryNode MinTmpDiskNode Features DelayBoot OverSubscribe Contiguous Licenses Network Command WorkDir StdErr "
    "StdIn StdOut Power"
).split()


def test_a_pending_job_has_every_key_of_slurm_in_its_order(lab: SlurmLab, waiting: str) -> None:
    found = shown(lab, f"job {waiting}")
    assert list(found) == KEYS
    assert found["JobId"] == waiting
    assert (found["JobState"], found["Reason"], found["StartTime"]) == ("PENDING", "JobHeldUser", "Unknown")
    assert (found["TimeLimit"], found["Priority"], found["NodeList"]) == ("01:00:00", "0", "")
    assert re.fullmatch(r"\w+\(\d+\)", found["UserId"])


def test_a_running_job_shows_its_node_and_cards(lab: SlurmLab) -> None:
    job = gsub(lab, "-c 2 -g fake:1 -m 1500M -t 10m --wrap 'sleep 100'")
    lab.wait_state(job, "RUNNING")
    found = shown(lab, f"job {job}")
    assert (found["NodeList"], found["BatchHost"], found["NumCPUs"]) == ("node1", "node1", "2")
    assert found["TRES"] == "cpu=2,mem=1500M,node=1,billing=2,gres/gpu=1"
    assert found["TresPerNode"] == "gres:gpu:fake:1"
    assert found["MinMemoryNode"] == "1500M"
    assert found["AllocNode:Sid"].startswith("node1:")
    text = lab.ok(f"scontrol show jobid -dd {job}")
    assert lab.ok(f"scontrol show job {job} -d") == re.sub(r"RunTime=\S+", re.search(r"RunTime=\S+", text)[0], text)  # type: ignore[index]
    assert "   JOB_GRES=gpu:fake:1\n     Nodes=node1 CPU_IDs=" in text
    assert re.search(r"GRES=gpu:fake:1\(IDX:\d\)\n", text)
    assert text.endswith("\n   \n\n")
    lab.ok(f"gcancel {job}")
    lab.wait(job)
    ended = shown(lab, f"job {job}")
    assert (ended["JobState"], ended["NodeList"]) == ("CANCELLED", "node1")


def test_a_job_that_failed_shows_code_and_reason(lab: SlurmLab) -> None:
    job = gsub(lab, "-t 1m --wrap 'exit 3'")
    lab.wait(job)
    found = shown(lab, f"job {job}")
    assert (found["JobState"], found["ExitCode"], found["Reason"]) == ("FAILED", "3:0", "NonZeroExitCode")
    document = lab.job(job)
    asked = {key: document[key] for key in JOB_KEYS}
    assert job_lines(asked, JobSurroundings(), is_detailed=True, now=1e9) == (
        job_lines(document, JobSurroundings(), is_detailed=True, now=1e9)
    ), "a key is not asked for"


def test_a_dependency_that_is_satisfied_is_not_shown(lab: SlurmLab, waiting: str) -> None:
    done = gsub(lab, "-t 1m --wrap true")
    failed = gsub(lab, "-t 1m --wrap false")
    lab.wait(done, failed)
    job = gsub(lab, f"-t 1m -d afterok:{done}:{waiting},afternotok:{failed},afterany:{waiting} --wrap true")
    assert shown(lab, f"job {job}")["Dependency"] == f"afterok:{waiting}(unfulfilled),afterany:{waiting}(unfulfilled)"
    never = gsub(lab, f"-t 1m --kill-on-invalid-dep no -d afterok:{failed} --wrap true")
    assert shown(lab, f"job {never}")["Dependency"] == f"afterok:{failed}(failed)"
    assert shown(lab, f"job {never}")["Reason"] == "DependencyNeverSatisfied"


def test_a_job_of_somebody_else_shows_no_more_than_the_daemon_tells(lab: SlurmLab, waiting: str) -> None:
    document = {**lab.job(waiting), **MASKED}
    for is_detailed in (False, True):
        lines = job_lines(document, JobSurroundings(), is_detailed=is_detailed, now=0.0)
        text = "\n".join(lines)
        assert f"JobName={document['name']}\n" in text
        assert "Command=-\nWorkDir=-\nStdErr=(null)\nStdIn=/dev/null\nStdOut=(null)\n" in text
        assert "None" not in text.replace("SuspendTime=None", "")


def test_a_pending_job_shows_when_it_is_expected_to_start(busy: tuple[SlurmLab, dict[int, str]]) -> None:
    lab, jobs = busy
    expected = dict(line.split() for line in lab.ok("squeue -h --start -o '%F %S'").splitlines())
    assert {at == "N/A" for at in expected.values()} == {True, False}
    for listing in ("scontrol show job -o", *(f"scontrol show job -o {job}" for job in expected)):
        for line in lab.ok(listing).splitlines():
            found = dict(word.split("=", 1) for word in line.split() if "=" in word)
            if found["JobState"] == "PENDING":
                at = expected[found.get("ArrayJobId", found["JobId"])]
                assert near(found["StartTime"], at), (listing, found["JobId"], found["StartTime"], at)
                assert (found["EndTime"] == "Unknown") == (at == "N/A")
    first = shown(lab, f"job {jobs[26]}")
    assert seconds(first["EndTime"]) - seconds(first["StartTime"]) == 30 * 60
    assert shown(lab, f"job {jobs[30]}")["StartTime"] == "Unknown", "held"
    begins = shown(lab, f"job {jobs[31]}")
    assert seconds(begins["StartTime"]) > time.time() + 1800
    assert seconds(begins["EndTime"]) - seconds(begins["StartTime"]) == 3600


def seconds(text: str) -> float:
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))


def near(shown: str, at: str) -> bool:
    """Whether scontrol shows the start that squeue does: each has its own forecast."""
    return shown == "Unknown" if at == "N/A" else abs(seconds(shown) - seconds(at)) < 60


def test_details_have_the_highest_code_of_the_steps(lab: SlurmLab) -> None:
    job = lab.submit("-t 5 --wrap 'srun -n1 true; srun -n1 bash -c \"exit 5\"; exit 0'")
    lab.wait(job)
    found = shown(lab, f"job {job} -d")
    assert (found["ExitCode"], found["DerivedExitCode"], found["JobState"]) == ("0:0", "5:0", "COMPLETED")


def test_dependencies_show_their_standing(lab: SlurmLab, waiting: str) -> None:
    job = gsub(lab, f"-t 1m -d afterok:{waiting} --wrap true")
    assert shown(lab, f"job {job}")["Dependency"] == f"afterok:{waiting}(unfulfilled)"
    either = gsub(lab, f"-t 1m -d 'afterok:{waiting}?afternotok:{waiting}:{job}' --wrap true")
    assert shown(lab, f"job {either}")["Dependency"] == (
        f"afterok:{waiting}(unfulfilled)?afternotok:{waiting}(unfulfilled)?afternotok:{job}(unfulfilled)"
    )


def test_an_array_shows_its_tasks_and_each_task_itself(lab: SlurmLab) -> None:
    job = gsub(lab, "--hold -a 1-10%2 -t 1m --wrap true")
    found = shown(lab, f"job {job}")
    assert (found["ArrayJobId"], found["ArrayTaskId"], found["ArrayTaskThrottle"]) == (job, "1-10%2", "2")
    assert shown(lab, f"jobid {job}_2")["ArrayTaskId"] == "2"
    odd = gsub(lab, "--hold -a 1-9:2 -t 1m --wrap true")
    assert shown(lab, f"job {odd}")["ArrayTaskId"] == "1,3,5,7,9"
    assert lab.ok(f"scontrol show job {job}_[3-4]").count("JobId=") == 4  # with ArrayJobId
    assert lab.type(f"scontrol show job {job}_99").code == 1


def task_ids(lab: SlurmLab, words: str) -> list[tuple[str, str]]:
    """Numbers of tasks and states of the entries that are shown."""
    lines = lab.ok(f"scontrol -o show {words}").splitlines()
    return [(field(line, "ArrayTaskId"), field(line, "JobState")) for line in lines]


def field(line: str, key: str) -> str:
    return line.partition(f" {key}=")[2].partition(" ")[0]


def test_an_array_that_has_ended_is_shown_as_its_tasks(own_lab: SlurmLab) -> None:
    lab = own_lab
    done, one = lab.submit("-a 0-2%1 --wrap true"), lab.submit("-a 5 --wrap true")
    lab.wait(done, one)
    of_done = [("0", "COMPLETED"), ("1", "COMPLETED"), ("2", "COMPLETED")]
    assert task_ids(lab, f"job {done}") == of_done
    assert task_ids(lab, f"job {one}") == [("5", "COMPLETED")]
    assert task_ids(lab, "jobs") == [*of_done, ("5", "COMPLETED")]
    assert lab.ok(f"scontrol --json show job {done}").count('"array_task_id"') == 3


def test_an_array_is_shown_with_the_tasks_that_have_started(own_lab: SlurmLab) -> None:
    lab = own_lab
    job = lab.submit("-a 0-8:2%1 --wrap 'trap \"\" TERM; sleep 60 & wait; wait'")
    lab.wait_state(f"{job}_0", "RUNNING")
    assert sorted(task_ids(lab, f"job {job}")) == [("0", "RUNNING"), ("2,4,6,8%1", "PENDING")]
    # The tasks that are left are never started; the first one takes its grace to end.
    lab.ok(f"scancel {job}")
    assert ("2,4,6,8%1", "CANCELLED") in task_ids(lab, f"job {job}")
    assert f"{job}_[2,4,6,8%1]" in lab.ok(f"sacct -X -n -P -o jobid -j {job}").splitlines()
    lab.wait(job)
    assert sorted(task_ids(lab, f"job {job}")) == [("0", "CANCELLED"), ("2,4,6,8%1", "CANCELLED")]


def test_unknown_and_malformed_ids_say_so(lab: SlurmLab) -> None:
    for line, text in (
        ("scontrol show job 99999", "slurm_load_jobs error: Invalid job id specified\n"),
        ("scontrol show job abc", "scontrol_print_job error: Invalid job id specified\n"),
        ("scontrol show job 1_", "scontrol_print_job error: Invalid job id specified\n"),
        ("scontrol -Q show job 99999", ""),
    ):
        done = lab.type(line)
        assert (done.code, done.out, done.err.strip()) == (1, "", text.strip()), line


def test_control_characters_of_a_name_cannot_forge_lines(lab: SlurmLab) -> None:
    job = gsub(lab, "--hold -t 1m -J $'x\\n   JobState=FAILED' --wrap true")
    text = lab.ok(f"scontrol show job {job}")
    assert "\n   JobState=FAILED" not in text
    assert "\n   JobState=PENDING" in text


# --- show the rest --------------------------------------------------------------------------------


def test_a_node_and_its_partitions(lab: SlurmLab) -> None:
    node = shown(lab, "node node1 | sed 's/OS=.*RealMemory/RealMemory/'")
    assert (node["CPUTot"], node["RealMemory"], node["Gres"]) == ("8", "24105", "gpu:fake:4")
    assert node["CfgTRES"] == "cpu=8,mem=24105M,billing=8,gres/gpu=4"
    assert node["Partitions"] == "main,over,debug"
    part = shown(lab, "part debug")
    assert (part["MaxTime"], part["DefaultTime"], part["Default"]) == ("00:10:00", "00:10:00", "NO")
    assert shown(lab, "partition=main")["Default"] == "YES"
    names = [line.split()[0] for line in lab.ok("scontrol show partitions -o").splitlines()]
    assert names == ["PartitionName=main", "PartitionName=over", "PartitionName=debug"]
    for line, text in (
        ("show node nope", "Node nope not found\n"),
        ("show partition nope", "Partition nope not found\n"),
        ("show reservation nope", "Reservation nope not found\n"),
    ):
        done = lab.type(f"scontrol {line}")
        assert (done.code, done.out) == (1, text)


def test_steps_are_shown_while_they_run(lab: SlurmLab) -> None:
    job = lab.submit("-c 2 -t 5 -J stepped --wrap 'srun -n1 -J one sleep 100'")
    lab.wait_state(job, "RUNNING")
    wait_until(lambda: lab.type(f"scontrol show step {job}.0").code == 0, what="a step")
    text = lab.ok(f"scontrol -o show step {job}.0")
    found = dict(word.split("=", 1) for word in text.split())
    assert (found["StepId"], found["State"], found["Tasks"]) == (f"{job}.0", "RUNNING", "1")
    assert (found["NodeList"], found["Name"]) == ("node1", "one")
    assert [line.split()[0] for line in lab.ok(f"scontrol -o show step {job}").splitlines()] == [
        *(f"StepId={job}.batch", f"StepId={job}.0")
    ]
    rows = [line.split() for line in lab.ok(f"scontrol listpids {job}.0").splitlines()[1:]]
    assert rows
    assert {row[2] for row in rows} == {"0"}
    lab.ok(f"gcancel {job}")
    lab.wait(job)
    done = lab.type(f"scontrol show step {job}")
    assert (done.code, done.out) == (1, f"Job step {job} not found\n")


def test_json_is_that_of_squeue_and_sinfo(lab: SlurmLab, waiting: str) -> None:
    (job,) = json.loads(lab.ok(f"scontrol show job {waiting} --json"))["jobs"]
    (same,) = json.loads(lab.ok(f"squeue --json -j {waiting}"))["jobs"]
    assert job.keys() == same.keys()
    assert (str(job["job_id"]), job["job_state"], job["name"]) == (waiting, "PENDING", "waiting")
    (node,) = json.loads(lab.ok("scontrol --json show nodes"))["nodes"]
    assert node["name"] == "node1"
    assert json.loads(lab.ok("scontrol show job --json")).keys() == {"meta", "errors", "jobs"}
    assert lab.type("scontrol --json show job 99999").code == 1
    assert lab.type("scontrol --json show partition").code == 1


def test_config_has_what_clients_read(lab: SlurmLab) -> None:
    lines = lab.ok("scontrol show config").splitlines()
    rows = dict(re.split(r"\s+= ", line, maxsplit=1) for line in lines if " = " in line)
    assert rows["MinJobAge"] == "300 sec"
    assert int(rows["MaxArraySize"]) > 1000
    assert rows["SLURM_VERSION"] == "22.05.8"
    assert rows["ProctrackType"].startswith("proctrack/")
    assert rows["ClusterName"]
    assert {"KillWait", "SelectTypeParameters"} <= rows.keys()
    assert lines[-1] == "Slurmctld(primary) at node1 is UP"
    assert all(line[24:26] == "= " or len(line.split(" =")[0]) > 23 for line in lines if " = " in line)


# --- verbs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "code", "err"),
    [
        ("release 99999", 1, "Invalid job id specified for job 99999\nslurm_suspend error: Invalid job id specified\n"),
        ("requeue 99999", 1, "Invalid job id specified for job 99999\n"),
        ("requeue abc", 1, "Invalid job id specified for job abc\n"),
        ("update jobid=99999 timelimit=1", 1, "Invalid job id specified for job 99999\n"),
        ("wait_job 99999", 1, "scontrol: Problem running job 99999\n"),
        ("frobnicate", 1, "invalid keyword: frobnicate\n"),
        ("show frobs", 1, "invalid entity:frobs for keyword:show \n"),
        ("show", 1, "too few arguments for keyword:show\n"),
        ("hold", 1, "too few arguments for keyword:hold\n"),
        ("ping now", 1, "too many arguments for keyword:ping\n"),
        ("update", 1, "too few arguments for keyword:update\n"),
        (
            "--nosuch",
            1,
            "scontrol: unrecognized option '--nosuch'\nTry \"scontrol --help\" for more information\n",
        ),
        ("shutdown", 1, "scontrol: error: shutdown is not supported; use: gpusched daemon stop\n"),
        ("delete ReservationName=none", 1, "slurm_delete_reservation error: Requested reservation is invalid\n"),
    ],
)
def test_mistakes_are_answered_as_slurm_answers_them(lab: SlurmLab, line: str, code: int, err: str) -> None:
    done = lab.type(f"scontrol {line}")
    assert (done.code, done.out, done.err) == (code, "", err)


def test_hold_and_release_one_or_several(lab: SlurmLab) -> None:
    one, two = (gsub(lab, "--begin now+1h -t 1m --wrap true") for _ in range(2))
    lab.ok(f"scontrol hold {one},{two}")
    assert [lab.job(job)["hold"] for job in (one, two)] == ["user", "user"]
    lab.ok(f"scontrol release {one} {two}")
    assert [lab.job(job)["hold"] for job in (one, two)] == [None, None]
    done = lab.type(f"scontrol uhold {one} 99999 {two}")
    assert done.code == 1
    assert [lab.job(job)["hold"] for job in (one, two)] == ["user", "user"], "a mistake spares the others"


def test_hold_and_release_take_a_name(lab: SlurmLab) -> None:
    jobs = [gsub(lab, "--begin now+1h -t 1m -J named --wrap true") for _ in range(2)]
    lab.ok("scontrol hold jobname=named")
    assert [lab.job(job)["hold"] for job in jobs] == ["user", "user"]
    lab.ok("scontrol release JobName=named")
    assert [lab.job(job)["hold"] for job in jobs] == [None, None]
    assert lab.type("scontrol hold jobname=nosuch").err.startswith("Invalid job id specified for job jobname=nosuch\n")


def test_requeue_from_outside_runs_again_and_requeuehold_waits(lab: SlurmLab, waiting: str) -> None:
    done = lab.type(f"scontrol requeue {waiting}")
    assert (done.code, done.err) == (1, f"Job is pending execution for job {waiting}\n")
    job = gsub(lab, "-t 5m --wrap 'sleep 100'")
    lab.wait_state(job, "RUNNING")
    lab.ok(f"scontrol requeuehold {job}")
    lab.wait_state(job, "PENDING")
    found = shown(lab, f"job {job}")
    assert (found["Restarts"], found["JobState"], found["Priority"]) == ("1", "PENDING", "0")
    lab.ok(f"scontrol release {job}")
    lab.wait_state(job, "RUNNING")
    lab.ok(f"gcancel {job}")
    lab.wait(job)
    done = lab.type(f"scontrol requeue {job}")
    assert (done.code, done.err) == (1, f"Job/step already completing or completed for job {job}\n")


def test_suspend_and_resume(lab: SlurmLab, waiting: str) -> None:
    job = gsub(lab, "-t 5m --wrap 'sleep 100'")
    lab.wait_state(job, "RUNNING")
    lab.ok(f"scontrol suspend {job}")
    lab.wait_state(job, "SUSPENDED")
    assert shown(lab, f"job {job}")["SuspendTime"] != "None"
    lab.ok(f"scontrol resume {job}")
    lab.wait_state(job, "RUNNING")
    assert lab.type(f"scontrol resume {job}").code == 1
    assert lab.type(f"scontrol suspend {waiting}").err == f"Job is pending execution for job {waiting}\n"
    lab.ok(f"gcancel {job}")


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ("timelimit=3", "time_limit_s", 180),
        ("TimeLimit=1-00:00:00", "time_limit_s", 86400),
        ("TimeLimit=+30", "time_limit_s", 5400),
        ("TimeLimit=-15", "time_limit_s", 2700),
        ("name=renamed", "name", "renamed"),
        ("JobName=other", "name", "other"),
        ("Nice=10", "nice", 10),
        ("partition=over", "queue", "over"),
        ("qos=urgent", "qos", "urgent"),
        ("numcpus=3", "cpus", 3.0),
        ("MinMemoryNode=2G", "mem_mib", 2048),
        ("Gres=gpu:2", "gpus_per_node", 2),
        ("ReqNodeList=node1", "nodelist", ["node1"]),
        ("OverSubscribe=no", "exclusive", True),
    ],
)
def test_update_changes_a_pending_job(lab: SlurmLab, waiting: str, words: str, key: str, value: object) -> None:
    lab.ok(f"scontrol update jobid={waiting} {words}")
    assert lab.job(waiting)[key] == value


def test_update_takes_the_id_as_a_word_and_several_changes(lab: SlurmLab, waiting: str) -> None:
    lab.ok(f"scontrol update job {waiting} name=two nice=5 timelimit=7")
    found = lab.job(waiting)
    assert (found["name"], found["nice"], found["time_limit_s"]) == ("two", 5, 420)
    other = gsub(lab, "--hold -t 1m --wrap true")
    lab.ok(f"scontrol update JobId={waiting},{other} JobName=both")
    assert [lab.job(job)["name"] for job in (waiting, other)] == ["both", "both"]


@pytest.mark.parametrize(
    "words", ["colour=red", "timelimit=never", "nice=much", "numcpus=x", "priority=99999", "gres=x:1"]
)
def test_update_refuses_what_it_cannot_do_and_changes_nothing(lab: SlurmLab, waiting: str, words: str) -> None:
    done = lab.type(f"scontrol update jobid={waiting} name=changed {words}")
    assert (done.code, done.out) == (1, "")
    assert done.err
    assert "Traceback" not in done.err
    assert lab.job(waiting)["name"] == "waiting"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("ExcNodeList=node7", "Invalid node name specified"),
        ("ReqNodeList=node7", "Invalid node name specified"),
        ("Partition=nosuch", "Invalid partition name specified"),
        ("QOS=nosuch", "Invalid qos specification"),
        ("Features=nosuch", "Invalid feature specification"),
    ],
)
def test_update_says_in_slurms_words_which_name_is_wrong(
    lab: SlurmLab, waiting: str, words: str, sentence: str
) -> None:
    done = lab.type(f"scontrol update jobid={waiting} {words}")
    assert (done.code, done.out, done.err) == (1, "", f"{sentence} for job {waiting}\n")


def test_update_of_a_running_job_says_what_cannot_change(lab: SlurmLab) -> None:
    job = gsub(lab, "-t 5m --wrap 'sleep 100'")
    lab.wait_state(job, "RUNNING")
    done = lab.type(f"scontrol update jobid={job} partition=debug")
    assert (done.code, done.err) == (1, f"Job is no longer pending execution for job {job}\n")
    lab.ok(f"scontrol update jobid={job} timelimit=4")
    assert lab.job(job)["time_limit_s"] == 240
    lab.ok(f"gcancel {job}")
    lab.wait(job)
    done = lab.type(f"scontrol update jobid={job} timelimit=1")
    assert (done.code, done.err) == (1, f"Job/step already completing or completed for job {job}\n")


def test_a_script_is_written_as_it_was_submitted(lab: SlurmLab) -> None:
    job = gsub(lab, "--hold -t 1m job.sh")
    assert lab.ok(f"scontrol write batch_script {job} -") == (lab.work / "job.sh").read_text()
    assert lab.ok(f"scontrol write batch_script {job}") == f"batch script for job {job} written to slurm-{job}.sh\n"
    assert (lab.work / f"slurm-{job}.sh").read_text() == (lab.work / "job.sh").read_text()
    assert (
        lab.type("scontrol write batch_script 99999 -").err == "job script retrieval failed: Invalid job id specified\n"
    )
    assert lab.type(f"scontrol write batch_script {job} /nonexistent/x").code == 1


def test_listpids_and_wait_job(lab: SlurmLab) -> None:
    job = gsub(lab, "-t 5m --wrap 'sleep 100'")
    lab.ok(f"scontrol wait_job {job}")
    wait_until(lambda: lab.job(job)["runs"][-1]["pid"], what="the job's process")
    head, first, *_ = lab.ok(f"scontrol listpids {job}").splitlines()
    assert head.split() == "PID JOBID STEPID LOCALID GLOBALID".split()
    assert first.split()[1:] == [job, "batch", "0", "0"]
    assert int(first.split()[0]) == lab.job(job)["runs"][-1]["pid"]
    lab.ok(f"gcancel {job}")
    lab.wait(job)
    assert lab.type(f"scontrol listpids {job}").code == 1
    assert lab.type(f"scontrol wait_job {job}").code == 1


def test_nodes_drain_with_a_reason_and_resume(own_lab: SlurmLab) -> None:
    lab = own_lab
    assert lab.type("scontrol update nodename=node1 state=drain").code == 1, "no reason"
    lab.ok("scontrol update nodename=node1 state=drain reason='fan failure'")
    text = lab.ok("scontrol show node node1")
    assert "State=IDLE+DRAIN " in text
    assert re.search(r"\n   Reason=fan failure \[\w+@\d{4}-\d\d-\d\dT[\d:]{8}\]\n", text)
    lab.ok("scontrol update nodename=node1 state=resume")
    assert "State=IDLE " in lab.ok("scontrol show node")
    for words in ("nodename=nope state=resume", "nodename=node1 state=orange", "nodename=node1 weight=7"):
        assert lab.type(f"scontrol update {words}").code == 1


def test_reservations_come_and_go(own_lab: SlurmLab) -> None:
    lab = own_lab
    assert lab.ok("scontrol show reservation") == "No reservations in the system\n"
    words = "ReservationName=class StartTime=now+60minutes Duration=60 Users=bob Nodes=node1"
    assert lab.ok(f"scontrol create reservation {words}") == "Reservation created: class\n"
    found = shown(lab, "res class")
    assert (found["Duration"], found["Nodes"], found["Users"]) == ("01:00:00", "node1", "bob")
    assert (found["State"], found["CoreCnt"]) == ("INACTIVE", "8")
    assert lab.ok("scontrol create res StartTime=now+3hours Duration=1:00:00 Users=bob TRES=gres/gpu=1") == (
        "Reservation created: bob_1\n"
    )
    for bad in (
        "ReservationName=x Users=bob",
        "ReservationName=x Duration=5",
        "ReservationName=x Duration=5 Users=b Z=1",
    ):
        assert lab.type(f"scontrol create reservation {bad}").code == 1, bad
    done = lab.type("scontrol create reservation ReservationName=x Duration=5 Users=bob Nodes=node9")
    assert (done.code, done.err) == (1, "Error creating the reservation: Invalid node name specified\n")
    lab.ok("scontrol delete ReservationName=class,bob_1")
    assert lab.ok("scontrol show reservation") == "No reservations in the system\n"


def test_lines_on_stdin_are_obeyed_one_by_one(lab: SlurmLab) -> None:
    done = lab.type("printf 'ping\\nnonsense\\n\\nversion\\nquit\\nping\\n' | scontrol")
    assert done.out == "Slurmctld(primary) at node1 is UP\nslurm-wlm 22.05.8\n"
    assert (done.code, done.err) == (1, "invalid keyword: nonsense\n")


def test_no_daemon_is_said_in_slurms_words(lab: SlurmLab) -> None:
    done = lab.type("scontrol show job 1", GPUSCHED_SOCKET="/nonexistent/socket")
    assert done.code == 1
    assert done.err.startswith("scontrol: error: Unable to contact slurm controller (connect failure)\n")
    assert lab.type("scontrol ping", GPUSCHED_SOCKET="/nonexistent/socket").out.endswith(" is DOWN\n")


# --- in jobs --------------------------------------------------------------------------------------


def test_a_job_requeues_itself_and_its_code_does_not_count(lab: SlurmLab) -> None:
    script = (
        "echo restart=$SLURM_RESTART_COUNT on $(scontrol show hostnames | head -n 1); "
        '[ -n "$SLURM_RESTART_COUNT" ] || { scontrol requeue $SLURM_JOB_ID; exit 255; }'
    )
    job = lab.submit(f"-t 5 -o rq-%j.txt --open-mode=append --requeue --wrap '{script}'")
    lab.wait(job)
    found = shown(lab, f"job {job}")
    assert (found["JobState"], found["ExitCode"], found["Restarts"]) == ("COMPLETED", "0:0", "1")
    lines = [line for line in lab.text(f"rq-{job}.txt").splitlines() if "DUE TO JOB REQUEUE" not in line]
    assert lines == ["restart= on node1", "restart=1 on node1"]


def test_a_task_requeues_itself_alone(lab: SlurmLab) -> None:
    script = (
        "echo $SLURM_ARRAY_TASK_ID $SLURM_RESTART_COUNT >> tasks-$SLURM_ARRAY_JOB_ID; "
        '[ -n "$SLURM_RESTART_COUNT" -o $SLURM_ARRAY_TASK_ID = 1 ] || '
        "{ scontrol requeue ${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; exit 1; }"
    )
    (lab.work / "task.sh").write_text(f"#!/bin/bash\n{script}\n")
    job = lab.submit("-t 5 -a 1-3 task.sh")
    lab.wait(job)
    assert sorted(line.split() for line in lab.text(f"tasks-{job}").splitlines()) == [
        *(["1"], ["2"], ["2", "1"], ["3"], ["3", "1"])
    ]
    assert [shown(lab, f"job {job}_{task}")["JobState"] for task in (1, 2, 3)] == ["COMPLETED"] * 3


def test_torchx_counts_its_restarts(lab: SlurmLab) -> None:
    script = """#!/bin/bash
#SBATCH --job-name=worker-0 --requeue --ntasks-per-node=1 --cpus-per-task=1 --mem=200
#SBATCH --time=5
echo try $SLURM_RESTART_COUNT >> tries-$SLURM_JOB_ID
if [ "${SLURM_RESTART_COUNT:-0}" -lt 2 ]; then scontrol requeue "$SLURM_JOB_ID"; exit 1; fi
"""
    (lab.work / "torchx.sh").write_text(script)
    job = lab.submit("torchx.sh")
    lab.wait(job)
    assert lab.text(f"tries-{job}").split() == ["try", "try", "1", "try", "2"]


# --- the lines of clients, with the parsing of each -----------------------------------------------


@pytest.fixture
def running(lab: SlurmLab) -> Iterator[str]:
    """A job with two cards."""
    job = lab.submit("-J train -c 2 --mem=1G --gres=gpu:2 -t 10 --comment note --wrap 'sleep 300'")
    lab.wait_state(job, "RUNNING")
    yield job
    lab.ok(f"gcancel {job}")
    lab.wait(job)


def test_qtoolkit_splits_every_word_at_its_first_equals_sign(lab: SlurmLab, running: str) -> None:
    text = lab.ok(f"SLURM_TIME_FORMAT='standard' scontrol show job -o {running}")
    found = {}
    for word in text.split():
        key, value = word.split("=", maxsplit=1)
        found[key] = value
    assert (found["JobState"], found["JobId"], found["JobName"]) == ("RUNNING", running, "train")
    assert (found["Partition"], found["NumNodes"], found["NumCPUs"], found["CPUs/Task"]) == ("main", "1", "2", "2")
    assert (found["TimeLimit"], found["Comment"], found["MinMemoryNode"]) == ("00:10:00", "note", "1G")
    assert found["UserId"].split("(")[0]


def test_evgltop_reads_the_numbers_of_the_cards(lab: SlurmLab, running: str) -> None:
    text = lab.ok(f"scontrol show job {running} -d")
    for key in "UserId JobName RunTime TimeLimit BatchFlag Partition MinMemoryNode TresPerNode".split():
        assert re.search(rf"{key}=(\S+)", text), key
    assert "TresPerNode=gres:gpu:2" in text
    assert re.search(r"GRES=\S+\(IDX:([\d,-]+)\)", text)
    assert re.search(r"AllocNode:Sid=(\S+):(\d+)", text)


def test_slurm_gpustat_and_slurm_usage_read_nodes(lab: SlurmLab, running: str) -> None:
    assert "IDX:" in lab.ok(f"scontrol show jobid -dd {running}")
    lines = {
        key: value
        for key, _, value in (line.strip().partition("=") for line in lab.ok("scontrol show node node1").splitlines())
    }
    assert "gres/gpu=4" in lines["CfgTRES"]
    assert re.search(r"gres/gpu=(\d+)", lines["AllocTRES"])
    cpus = re.search(r"CPUTot=(\d+)", lab.ok("scontrol show node node1"))
    assert cpus is not None
    assert cpus[1] == "8"


def test_open_ondemand_and_skypilot_read_partitions_and_nodes(lab: SlurmLab) -> None:
    for line in ("scontrol show part -o", "scontrol show partitions -o"):
        rows = [dict(word.split("=", 1) for word in row.split()) for row in lab.ok(line).splitlines()]
        assert [row["PartitionName"] for row in rows] == ["main", "over", "debug"]
        assert {row["AllowQos"] for row in rows} == {"ALL"}
        assert [row["Default"] for row in rows] == ["YES", "NO", "NO"]
    (row,) = lab.ok("scontrol show node -o").splitlines()
    assert re.search(r"NodeName=(\S+)", row)
    assert re.search(r" CPUTot=8 .* Gres=gpu:fake:4 .* RealMemory=24105 ", row)
    assert lab.ok("scontrol show config | grep ProctrackType").split("=")[1].strip().startswith("proctrack/")


def test_snakemake_reads_config_and_partitions(lab: SlurmLab) -> None:
    config = lab.ok("scontrol show config")
    assert re.search(r"MinJobAge\s*=\s*(\d+)\s*sec", config)
    assert re.search(r"MaxArraySize\s*=\s*(\d+)", config)
    (name,) = re.findall(r"(?m)^ClusterName\s+= (\S+)$", config)
    for line in ("scontrol show partition", f"scontrol show partition -M {name}"):
        blocks = lab.ok(line).strip().split("\n\n")
        assert len(blocks) == 3
        found = dict(word.split("=", 1) for word in blocks[0].split())
        assert (found["MaxTime"], found["MaxNodes"], found["TotalCPUs"]) == ("1-00:00:00", "UNLIMITED", "8")
        assert found["TRES"] == "cpu=8,mem=24105M,node=1,billing=8,gres/gpu=4"
    assert lab.type("scontrol show partition -M elsewhere").code == 1


def test_stui_finds_the_name_of_the_cluster(lab: SlurmLab) -> None:
    (name,) = re.findall(r"(?m)^ClusterName\s+= (\S+)$", lab.ok("scontrol show config"))
    job = lab.submit("-t 1 -o name-%j --wrap 'echo $SLURM_CLUSTER_NAME'")
    lab.wait(job)
    assert lab.text(f"name-{job}").strip() == name


# --- other users ----------------------------------------------------------------------------------


@pytest.fixture
def shared() -> Iterator[SystemDaemon]:
    """A system's daemon with jobs of two people."""
    found = SystemDaemon('[node]\nname = "node1"\ncpus = 8\n', fake_gpus="4xfake:16GiB")
    found.settings.write_text(found.settings.read_text().replace("[node]\ncpus = 8\n", ""))
    found.start()
    yield found
    found.close()


def typed(daemon: SystemDaemon, user: str, line: str) -> tuple[int, str, str]:
    """What a user gets who types a line of scontrol: exit code, stdout and stderr."""
    # A process that has become somebody else may not be able to read this Python.
    from gpusched.addons.slurm import scontrol_job, scontrol_show, scontrol_update  # noqa: F401

    def deed() -> tuple[int, str, str]:
        os.environ["GPUSCHED_SOCKET"] = str(daemon.socket)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = run(scontrol.COMMAND, scontrol.body, line.split())
        return code, out.getvalue(), err.getvalue()

    return as_user(user, deed)


@NEEDS_ROOT
def test_other_users_jobs_and_nodes_are_refused_in_slurms_words(shared: SystemDaemon) -> None:
    ann, bob = shared.person(ANN), shared.person(BOB)
    mine, theirs = ann.submit("sleep", "100", time_limit_s=600), bob.submit("sleep", "100", time_limit_s=600)
    for job in (mine, theirs):
        shared.wait_state(job, "RUNNING")
    golden = {
        "153-scontrol-update-time-up": f"update jobid={mine} timelimit=600",
        "154-scontrol-update-prio": f"update jobid={mine} priority=99999",
        "158-scontrol-update-others": f"update jobid={theirs} timelimit=1",
        "167-scontrol-user-drain": "update nodename=node1 state=drain reason=x",
        "182-scontrol-create-res-user": "create reservation ReservationName=mine StartTime=now Duration=60 "
        "Users=alice Nodes=node1",
    }
    for one in cases("scontrol", *golden):
        expected = one.err.replace("25", mine).replace("32", mine).replace("26", theirs)
        assert typed(shared, ANN, golden[one.name]) == (one.code, "", expected), one.name
    for verb in ("requeue", "requeuehold", "suspend"):
        assert typed(shared, ANN, f"{verb} {theirs}") == (1, "", f"Access/permission denied for job {theirs}\n")
    for verb in ("hold", "release"):
        code, out, err = typed(shared, ANN, f"{verb} {theirs}")
        assert (code, out, err.splitlines()[0]) == (1, "", f"Invalid user id for job {theirs}")
    assert typed(shared, ANN, "reconfigure") == (1, "", "slurm_reconfigure error: Invalid user id\n")
    assert typed(shared, ANN, f"write batch_script {theirs} -")[::2] == (
        1,
        "job script retrieval failed: Access/permission denied\n",
    )
    code, out, err = typed(shared, ANN, f"show job {theirs}")
    assert (code, err) == (0, "")
    assert f"UserId={BOB}(" in out
    assert "JobName=sleep\n" in out
    assert "sleep 100" not in out
    assert shared.state(theirs) == "RUNNING"


_WORD = st.sampled_from(
    "show job jobs node hold release update requeue jobid=1 JobId= name=x timelimit=:: -o -d -Q --json create delete "
    "reservation write batch_script - 1_[ 1_[1-3] [] = == @ p1 %s nodename=node1 state= listpids 1.batch hostnames "
    "wait_job version top --clusters=all -M suspend 99999999999999999999".split()
) | st.text(max_size=8).filter(lambda text: "\0" not in text and text != "wait_job")


def test_any_words_get_an_answer_or_lines_of_error(lab: SlurmLab) -> None:
    # One process for all of them: each start takes longer than a line.
    lines: list[list[str]] = []

    @given(st.lists(_WORD, min_size=1, max_size=5))
    def collect(words: list[str]) -> None:
        lines.append(words)

    collect()
    program = (
        "import json, sys\n"
        "from gpusched.addons.slurm import scontrol\n"
        "from gpusched.addons.slurm.command import run\n"
        "for words in json.load(sys.stdin):\n"
        "    code = run(scontrol.COMMAND, scontrol.body, words)\n"
        "    assert code in (0, 1), (words, code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(lines),
        env=lab.env,
        cwd=lab.work,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "bug in gpusched" not in done.stderr, done.stderr[-3000:]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("nodes", "name"),
    [
        ([[0, 1, 2]], "Block"),
        ([[0, 1], [2, 3]], "Block"),
        ([[0], [1]], "Block"),
        ([[0, 2], [1, 3]], "Cyclic"),
        ([[0, 2, 3], [1]], "Arbitrary"),
        ([[0, 1, 4, 5], [2, 3, 6]], "Plane"),
    ],
)
def test_a_step_shows_how_its_tasks_were_dealt_out(nodes: list[list[int]], name: str) -> None:
    assert distribution(nodes) == name
