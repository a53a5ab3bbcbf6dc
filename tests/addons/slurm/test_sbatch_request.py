"""Options of sbatch as fields of a submission: from a command line, from directives, from variables."""

from __future__ import annotations

import shlex
import subprocess
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpusched.addons.slurm import request as request_module
from gpusched.addons.slurm import salloc, sbatch, srun, srun_job
from gpusched.addons.slurm.command import Command, CommandError, parse, run
from gpusched.addons.slurm.request import JobRequest, from_variables
from gpusched.cli.parse import split_words
from gpusched.cli.slurm_options import ONLY_SLURM
from gpusched.model.spec import FIELDS

ALWAYS = {"never_satisfied": "wait", "if_infeasible": "wait"}


def read(line: str) -> JobRequest:
    request = JobRequest(sbatch.COMMAND, sbatch._OWN)
    request.take(parse(sbatch.COMMAND, shlex.split(line)).options)
    return request


def spec_of(line: str) -> dict[str, Any]:
    """Its fields, less those that every submission has."""
    found = read(line).spec()
    return {key: value for key, value in found.items() if ALWAYS.get(key) != value}


def refusal_of(line: str) -> CommandError:
    with pytest.raises(CommandError) as caught:
        read(line).spec()
    return caught.value


TABLE = [
    ("", {}),
    ("-A bio", {"account": "bio"}),
    ("--array=0-7%2", {"array": "0-7%2"}),
    ("--array=[1-2,5]", {"array": "1-2,5"}),
    ("--array=[1-9]%3", {"array": "1-9%3"}),
    ("--array=[1-9", {"array": "[1-9"}),
    ("-c 4", {"cpus": 4}),
    ("--cpus-per-gpu=8", {"cpus_per_gpu": 8}),
    ("--comment='two words'", {"comment": "two words"}),
    ("-C 'nvlink&!old'", {"constraint": "nvlink&!old"}),
    ("-d afterok:1:2,afterany:3", {"dependency": "afterok:1:2,afterany:3"}),
    ("-d singleton --kill-on-invalid-dep=yes", {"dependency": "singleton", "never_satisfied": "cancel"}),
    ("--kill-on-invalid-dep=no", {}),
    ("-e err -o out -i in", {"stderr": "err", "stdout": "out", "stdin": "in"}),
    ("-x n1,n[2-3]", {"exclude": ["n1,n[2-3]"]}),
    ("-w n1", {"nodelist": ["n1"]}),
    ("-w n1,n[2-3],n1", {"nodelist": ["n1,n[2-3],n1"], "nodes": 3}),
    ("-w n1,n2 -n 4", {"nodelist": ["n1,n2"], "nodes": 2, "ntasks": 4}),
    ("-w n1,n2 -n 1", {"nodelist": ["n1,n2"], "ntasks": 1}),
    ("-w n1,n2 -N 1", {"nodelist": ["n1,n2"], "nodes": 1}),
    ("-w n[1-", {"nodelist": ["n[1-"]}),
    ("-N 2 -n 1", {"nodes": 1, "ntasks": 1}),
    ("-N 3-4 -n 2", {"nodes": 2, "ntasks": 2}),
    ("--exclusive", {"exclusive": True}),
    ("--exclusive=user", {"exclusive": True}),
    ("-G 2", {"gpus": 2}),
    ("--gpus=a100:2", {"gpus": 2, "gpu_type": "a100"}),
    ("--gpus-per-node=2", {"gpus_per_node": 2}),
    ("--gpus-per-task=v100:1 -n4", {"gpus_per_task": 1, "gpu_type": "v100", "ntasks": 4}),
    ("--ntasks-per-gpu=2 -G2", {"ntasks_per_gpu": 2, "gpus": 2}),
    ("--gres=gpu", {"gpus_per_node": 1}),
    ("--gres=gpu:0", {"gpus_per_node": 0}),
    ("--gres=gpu:2", {"gpus_per_node": 2}),
    ("--gres=gres:gpu:2", {"gpus_per_node": 2}),
    ("--gres=gpu:a100", {"gpus_per_node": 1, "gpu_type": "a100"}),
    ("--gres=gpu:a100:2,scratch:10", {"gpus_per_node": 2, "gpu_type": "a100", "resources": {"scratch": 10}}),
    ("--gres=gpu:1g.10gb:1", {"gpus_per_node": 1, "gpu_type": "1g.10gb"}),
    ("--gres=mps:50", {"gpus_per_node": 1, "gpu_fraction": 0.5}),
    ("--gres=mps:100", {"gpus_per_node": 1}),
    ("--gres=none", {}),
    ("--gres=gpu:1 --gpus=2", {"gpus_per_node": 1, "gpus": 2}),
    ("-H", {"hold": True}),
    ("--priority=0", {"hold": True}),
    ("-J 'a b'", {"name": "a b"}),
    ("-L matlab:2,ansys", {"licenses": {"matlab": 2, "ansys": 1}}),
    ("--mail-type=ALL --mail-user=a@b", {"notify": ["begin", "end", "fail", "preempt", "retry"], "notify_to": ["a@b"]}),
    ("--mail-type=end,Fail", {"notify": ["end", "fail"]}),
    ("--mail-type=NONE --mail-user=a@b", {}),
    ("--mail-user=a@b", {}),
    ("--mail-type=ARRAY_TASKS", {}),
    ("--mail-type=TIME_LIMIT,TIME_LIMIT_90,INVALID_DEPEND", {"notify": ["fail", "time_limit_80"]}),
    ("--mem=100", {"mem_mib": 100}),
    ("--mem=4G", {"mem_mib": 4096}),
    ("--mem=4gb", {"mem_mib": 4096}),
    ("--mem=1.5G", {"mem_mib": 1536}),
    ("--mem=1500MB", {"mem_mib": 1500}),
    ("--mem=1025K", {"mem_mib": 2}),
    ("--mem=0", {"mem_mib": "all"}),
    ("--mem-per-cpu=2G", {"mem_per_cpu_mib": 2048}),
    ("--mem-per-cpu=0", {"mem_mib": "all"}),
    ("--mem-per-gpu=8G", {"mem_per_gpu_mib": 8192}),
    ("--nice", {"nice": 100}),
    ("--nice=5", {"nice": 5}),
    ("--nice=-5", {"nice": -5}),
    ("--nice=2147483645", {"nice": 10000}),
    ("-N 2", {"nodes": 2}),
    ("-N 1-2", {"nodes": 1, "nodes_max": 2}),
    ("-N 2-2", {"nodes": 2}),
    ("-n 2", {"ntasks": 2}),
    ("--tasks-per-node=2", {"ntasks_per_node": 2}),
    ("--requeue", {"requeue": True}),
    ("--requeue --no-requeue", {"requeue": False}),
    ("--open-mode=append", {"open_mode": "append"}),
    ("--open-mode=t", {"open_mode": "truncate"}),
    ("--mincpus=4", {"min_cpus": 4}),
    ("--gpus-per-socket=2 --sockets-per-node=2", {"gpus_per_node": 4}),
    ("-B 2:8 --gpus-per-socket=a100:1", {"gpus_per_node": 2, "gpu_type": "a100"}),
    ("-B 2:8:1 -G 1", {"gpus": 1}),
    ("--gres=shard:2", {"gpus_per_node": 1, "gpu_shards": 2}),
    ("--tres-per-task=cpu:2,gres/gpu:a100:1", {"cpus": 2, "gpus_per_task": 1, "gpu_type": "a100"}),
    ("--tres-per-task=cpu=4", {"cpus": 4}),
    ("--tres-per-task=gres:gpu:2", {"gpus_per_task": 2}),
    ("--mail-user=me@example.org", {}),
    ("--mail-type=NONE --mail-user=me@example.org", {}),
    ("-p debug", {"queue": "debug"}),
    ("-p debug,main", {"queue": "debug"}),
    ("--prefer=new", {"prefer": "new"}),
    ("-q high", {"qos": "high"}),
    ("--reservation=r", {"reservation": "r"}),
    ("--signal=USR2@90", {"notice": {"signal": 12, "before_s": 90, "main_only": False}}),
    ("--signal=B:USR1", {"notice": {"signal": 10, "before_s": 60, "main_only": True}}),
    ("--signal=R:15@5", {"notice": {"signal": 15, "before_s": 5, "main_only": False}}),
    ("-t 5", {"time_limit_s": 300}),
    ("-t 0:5:0", {"time_limit_s": 300}),
    ("-t 1-2:3", {"time_limit_s": 93780}),
    ("-t 0:30", {"time_limit_s": 60}),
    ("-t UNLIMITED", {"time_limit_s": "unlimited"}),
    ("-t 0", {"time_limit_s": "unlimited"}),
    ("--wckey=submitit", {"wckey": "submitit"}),
    ("-D /tmp", {"work_dir": "/tmp"}),
    ("-n 1 -n 2", {"ntasks": 2}),
    ("--mem=1G --mem=2G", {"mem_mib": 2048}),
    ("--account='' --reservation= --qos= -d '' --comment= -o '' -J ''", {}),
]


@pytest.mark.parametrize(("line", "fields"), TABLE)
def test_options_become_fields(line: str, fields: dict[str, Any]) -> None:
    assert spec_of(line) == fields
    assert fields.keys() <= FIELDS.keys()


def test_more_nodes_than_tasks_are_reduced_with_slurms_warning() -> None:
    request = JobRequest(sbatch.COMMAND)
    request.take(parse(sbatch.COMMAND, ["-N", "3", "-n", "2"]).options)
    assert request.spec()["nodes"] == 2
    assert request.notes == ["Warning: can't run 2 processes on 3 nodes, setting nnodes to 2"]


@pytest.mark.parametrize(("line", "fields"), TABLE)
def test_a_directive_means_the_same_as_the_words_typed(line: str, fields: dict[str, Any]) -> None:
    options = sbatch._read_directive(f"\t {line}   # a comment")
    assert options == parse(sbatch.COMMAND, shlex.split(line)).options


@pytest.mark.parametrize(
    ("line", "message", "code"),
    [
        ("-t abc", "Invalid --time specification", 255),
        ("-t ''", "Invalid --time specification", 255),
        ("--mem=lots", "Invalid --mem specification", 255),
        ("--mem=-1", "Invalid --mem specification", 255),
        ("--mem-per-cpu=x", "Invalid --mem-per-cpu specification", 255),
        # A dash is missing.
        ("-mem=4G", "Invalid --distribution specification", 255),
        ("-m ''", "Invalid --distribution specification", 255),
        ("-m block=2", "Invalid --distribution specification", 255),
        ("-m block:block:block:block", "Invalid --distribution specification", 255),
        ("-c zero", 'Invalid numeric value "zero" for --cpus-per-task.', 1),
        ("-c 0", 'Invalid numeric value "0" for --cpus-per-task.', 1),
        ("-n -1", 'Invalid numeric value "-1" for --ntasks.', 1),
        ("--tasks-per-node=0", 'Invalid numeric value "0" for --ntasks-per-node.', 1),
        ("-N 3-1", '"3-1" is not a valid node count', 255),
        ("-N x", '"x" is not a valid node count', 255),
        ("-G x", "Invalid --gpus specification", 255),
        ("-G a:b:1", "Invalid --gpus specification", 255),
        ("--gres=gpu:x:y:z", "Invalid generic resource (gres) specification", 1),
        ("--gres=gpu::2", "Invalid generic resource (gres) specification", 1),
        *(
            (f"'{words}'", "Invalid generic resource (gres) specification", 1)
            for words in (
                *("--gres=gpu:2|gpu:1", "--gres=gpu:2|1", "--gres=gpu:a100|t4:1", "--gpus=a100|t4:1"),
                *("--gpus-per-node=a100|t4:1", "--gpus-per-task=a100|t4:1", "--tres-per-task=gres/gpu:a100|t4:1"),
            )
        ),
        ("--gpus-per-socket=1", "--gpus-per-socket: it needs --sockets-per-node, as in Slurm; or give", 1),
        ("--gpus-per-socket=x", "Invalid --gpus-per-socket specification", 255),
        ("--sockets-per-node=many", "Invalid --extra-node-info specification", 255),
        ("--tres-per-task=mem:4G", "--tres-per-task: 'mem:4G' is not supported for each task, only cpu:N", 255),
        ("--mincpus=0", 'Invalid numeric value "0" for --mincpus.', 1),
        ("--gres=gpu:a100:1,gpu:t4:1", "GPUs of two types, a100 and t4,", 255),
        ("--gpus=a100:1,t4:1", "GPUs of several types are not supported", 255),
        ("--begin=yesteryear", "Invalid time specification (pos=0): yesteryear", 255),
        ("--deadline=x", "Invalid --deadline specification", 255),
        ("--mail-type=SOMETIMES", "Invalid --mail-type specification", 255),
        ("--mail-type=", "Invalid --mail-type specification", 255),
        ("--signal=NOPE@10", "Invalid --signal specification", 255),
        ("--signal=X:USR1", "Invalid --signal specification", 255),
        ("--nice=much", "Invalid --nice specification", 255),
        ("--priority=x", "Invalid --priority specification", 255),
        ("--open-mode=x", "Invalid --open-mode specification", 255),
        ("--exclusive=x", "Invalid --exclusive specification", 255),
        ("--kill-on-invalid-dep=x", "Invalid --kill-on-invalid-dep specification", 255),
        ("-L a:b", "Batch job submission failed: Invalid license specification", 1),
        ("-p ''", "invalid partition specified: (null)", 1),
        ("-w ''", "Invalid --nodelist specification", 255),
        ("-F /nosuch", "Unable to open file /nosuch", 1),
        ("--mem=1 --mem-per-cpu=1", "are mutually exclusive", 1),
        ("-c1 --cpus-per-gpu=1", "are mutually exclusive", 1),
        ("--reboot", "--reboot is not supported: ", 255),
        ("--container=x", "--container is not supported: start the container in the script", 255),
    ],
)
def test_bad_values_are_refused_in_slurms_words(line: str, message: str, code: int) -> None:
    error = refusal_of(line)
    assert message in error.text
    assert error.code == code


@pytest.mark.parametrize(
    ("lower", "upper", "fields"),
    [
        ("--mem=1G", "--mem-per-cpu=2G", {"mem_per_cpu_mib": 2048}),
        ("--mem-per-gpu=1G", "--mem=0", {"mem_mib": "all"}),
        ("-c 4", "--cpus-per-gpu=2", {"cpus_per_gpu": 2}),
        ("--gres=gpu:a100:2", "--gpus=1", {"gpus": 1}),
        ("--gpus=2", "-c 2", {"gpus": 2, "cpus": 2}),
        ("--no-requeue", "--requeue", {"requeue": True}),
        ("-t 5 -J a", "-t 10", {"time_limit_s": 600, "name": "a"}),
    ],
)
def test_a_stronger_layer_replaces_what_excludes_it(lower: str, upper: str, fields: dict[str, Any]) -> None:
    request = read(lower)
    request.take(parse(sbatch.COMMAND, upper.split()).options)
    assert {key: value for key, value in request.spec().items() if ALWAYS.get(key) != value} == fields


def test_variables_are_options(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "SBATCH_ACCOUNT": "bio",
        "SBATCH_TIMELIMIT": "2",
        "SBATCH_MEM_PER_NODE": "100",
        "SBATCH_EXCLUSIVE": "",
        "SBATCH_NO_REQUEUE": "1",
        "SBATCH_ARRAY_INX": "1-3",
        "SBATCH_JOB_NAME": "x",
        "SBATCH_WAIT": "",
        "SBATCH_OF_MY_OWN": "7",
        "SRUN_PARTITION": "no",
    }
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    request = JobRequest(sbatch.COMMAND, sbatch._OWN)
    request.take(from_variables(sbatch.COMMAND, "SBATCH_", sbatch._VARIABLES))
    assert {key: value for key, value in request.spec().items() if key not in ALWAYS} == {
        "account": "bio",
        "time_limit_s": 120,
        "mem_mib": 100,
        "exclusive": True,
        "requeue": False,
        "array": "1-3",
        "name": "x",
    }
    assert request.own == {"wait": None}


def test_variables_of_all_commands_are_weaker_than_those_of_sbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_CLUSTERS", "all")
    monkeypatch.setenv("SLURM_CLUSTERS", "gpusched")
    monkeypatch.setenv("SLURM_HINT", "nomultithread")
    request = JobRequest(sbatch.COMMAND, sbatch._OWN)
    request.take(from_variables(sbatch.COMMAND, "SBATCH_", sbatch._VARIABLES))
    assert (request.own, len(request.ignored)) == ({"clusters": "all"}, 1)


@pytest.mark.parametrize(("chosen", "code"), [("7", 7), ("256", 0), ("", 255), ("x", 255)])
def test_slurm_exit_error_is_the_code_of_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], chosen: str, code: int
) -> None:
    monkeypatch.setenv("SLURM_EXIT_ERROR", chosen)
    assert run(sbatch.COMMAND, sbatch.body, ["--nosuch"]) == code
    assert "unrecognized option" in capsys.readouterr().err


def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_TIMELIMIT", "soon")
    with pytest.raises(CommandError) as caught:
        from_variables(sbatch.COMMAND, "SBATCH_", sbatch._VARIABLES)
    assert caught.value.text == (
        "sbatch: error: Invalid --time specification\nsbatch: the variable SBATCH_TIMELIMIT=soon"
    )
    assert caught.value.code == 255


@pytest.mark.parametrize(
    "suffix",
    "ACCOUNT ACCTG_FREQ ARRAY_INX BATCH CLUSTERS CONSTRAINT CONTAINER CORE_SPEC CPUS_PER_GPU DEBUG DELAY_BOOT "
    "DISTRIBUTION EXCLUSIVE EXPORT GET_USER_ENV GPU_BIND GPU_FREQ GPUS GPUS_PER_NODE GPUS_PER_TASK GRES GRES_FLAGS "
    "HINT IGNORE_PBS JOB_NAME MEM_BIND MEM_PER_CPU MEM_PER_GPU MEM_PER_NODE NETWORK NO_KILL NO_REQUEUE OPEN_MODE "
    "OVERCOMMIT PARTITION POWER PROFILE QOS REQ_SWITCH REQUEUE RESERVATION SIGNAL SPREAD_JOB THREAD_SPEC "
    "THREADS_PER_CORE TIMELIMIT USE_MIN_NODES WAIT WAIT_ALL_NODES WCKEY".split(),
)
def test_every_documented_variable_names_an_option(suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"OPEN_MODE": "append", "DISTRIBUTION": "block"}
    monkeypatch.setenv(f"SBATCH_{suffix}", values.get(suffix, "1"))
    try:
        ((name, _),) = from_variables(sbatch.COMMAND, "SBATCH_", sbatch._VARIABLES)
    except CommandError as error:
        name = error.text.split("--")[1].split()[0]
        assert ONLY_SLURM[name].is_refused
    assert sbatch.COMMAND.by_name[f"--{name}"].long == f"--{name}"


OF_SLURM_22_05 = (
    "account acctg-freq array batch bb bbf begin chdir cluster cluster-constraint clusters comment constraint "
    "container contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot "
    "dependency distribution error exclude exclusive export export-file extra-node-info get-user-env gid gpu-bind "
    "gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags help hint hold ignore-pbs input "
    "job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus "
    "network nice no-kill no-requeue nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node "
    "ntasks-per-socket open-mode output overcommit oversubscribe parsable partition power prefer priority profile "
    "propagate qos quiet reboot requeue reservation signal sockets-per-node spread-job switches tasks-per-node "
    "test-only thread-spec threads-per-core time time-min tmp uid usage use-min-nodes verbose version wait "
    "wait-all-nodes wckey wrap"
).split()
SHORT = dict(
    pair.split("=")
    for pair in (
        "A=account a=array b=begin C=constraint c=cpus-per-task D=chdir d=dependency e=error F=nodefile G=gpus H=hold "
        "h=help i=input J=job-name k=no-kill L=licenses M=clusters m=distribution N=nodes n=ntasks O=overcommit "
        "o=output p=partition Q=quiet q=qos S=core-spec s=oversubscribe t=time V=version v=verbose W=wait w=nodelist "
        "x=exclude B=extra-node-info"
    ).split()
)


@pytest.mark.parametrize("name", OF_SLURM_22_05)
def test_every_option_of_sbatch_is_known(name: str) -> None:
    option = sbatch.COMMAND.by_name[f"--{name}"]
    assert f"--{name}" in option.names
    # Read, kept for the command itself, or in the table of what only Slurm has.
    probe = JobRequest(sbatch.COMMAND, (*sbatch._OWN, "help", "usage", "version"))
    key = option.long.removeprefix("--")
    known = ONLY_SLURM.get(key)
    is_refused = known is not None and known.is_refused and key not in sbatch._OWN
    try:
        probe.take([(key, "1")])
    except CommandError:
        assert is_refused or key in request_module._READERS
    else:
        assert not is_refused
        assert probe.own or probe.values or probe.ignored


@pytest.mark.parametrize("letter", SHORT)
def test_every_letter_of_sbatch_is_the_same_option(letter: str) -> None:
    assert sbatch.COMMAND.by_name[f"-{letter}"].long == f"--{SHORT[letter]}"


@pytest.mark.parametrize(
    "value",
    ["block", "cyclic", "*", "plane=2", "arbitrary", "block:fcyclic", "*:*:block", "cyclic,NoPack", "block:*,Pack"],
)
def test_every_distribution_of_slurm_is_taken(value: str) -> None:
    assert len(read(f"-m '{value}'").ignored) == 1


@pytest.mark.parametrize("name", [name for name, one in ONLY_SLURM.items() if not one.is_refused])
def test_an_option_without_effect_is_noted(name: str) -> None:
    request = JobRequest(sbatch.COMMAND, ())
    value = "block:cyclic,Pack" if name == "distribution" else "1"
    request.take([(name, value), (name, value)])
    assert (request.values, len(request.ignored)) == ({}, 1)
    assert f"--{name} has no effect: " in request.ignored[0]


WORDS = st.one_of(
    st.sampled_from([f"--{name}" for name in OF_SLURM_22_05] + [f"-{letter}" for letter in SHORT]),
    st.builds(
        "--{}={}".format, st.sampled_from(OF_SLURM_22_05), st.text("0123456789abG:-,@+%=/. \0\u00e9\udc80", max_size=8)
    ),
    st.text("-=ab0123456789:,", max_size=6),
)


@given(st.lists(WORDS, max_size=5))
def test_any_words_are_read_or_refused(words: list[str]) -> None:
    try:
        request = JobRequest(sbatch.COMMAND, (*sbatch._OWN, "help", "usage", "version"))
        request.take(parse(sbatch.COMMAND, words).options)
        found = request.spec()
    except CommandError as error:
        refusal = error
        assert (refusal.code in (1, 255), bool(refusal.text)) == (True, True)
    else:
        assert found.keys() <= FIELDS.keys()


@given(st.lists(st.text(st.characters(exclude_characters="\0\n\r"), max_size=10), max_size=4))
def test_words_quoted_for_a_shell_are_the_same_words_in_a_directive(words: list[str]) -> None:
    line = " ".join(shlex.quote(word) for word in words)
    assert split_words(line) == words


class FakeClient:
    """A daemon that takes everything."""

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        if path != "/v1/jobs":
            return {"cluster_name": "gpusched"}
        assert body["spec"].keys() <= FIELDS.keys()
        forecast = {"verdict": "starts_now", "start_at": 0.0, "node": "n", "queue": "q", "job_id": "1", "cpus": 1.0}
        return {"job": {"id": "1"}, "dry_run": forecast}


SOURCES = st.sampled_from([[], ["job.sh"], ["nosuch.sh", "x"], ["--wrap", "true"], ["-"], [":"]])


@given(words=st.lists(WORDS, max_size=4), program=SOURCES, directive=st.text("-=ab0123:,'\"# \t", max_size=12))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_command_line_is_submitted_or_refused_without_a_traceback(
    words: list[str],
    program: list[str],
    directive: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sbatch, "connect", FakeClient)
    monkeypatch.setattr(sbatch, "_await_end", lambda client, job_id: 0)
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"#!/bin/sh\n")))
    (tmp_path / "job.sh").write_text(f"#!/bin/sh\n#SBATCH {directive}\ntrue\n")
    code = run(sbatch.COMMAND, sbatch.body, [*words, *program])
    shown = capsys.readouterr()
    assert code in (0, 1, 255)
    assert "bug in gpusched" not in shown.err
    assert bool(code) <= bool(shown.err)


class FakeJob:
    """A job in the foreground that ends at once."""

    def __init__(self, command: Command, client: FakeClient, job_id: str, *, is_quiet: bool) -> None:
        self.job_id = job_id

    def note(self, text: str) -> None:
        pass

    def wait_for_start(self, within_s: float | None) -> dict[str, Any]:
        return {}

    def relay(self, where: dict[str, Any], step: str = "") -> None:
        pass

    def conclude(self, end: None) -> int:
        return 0


def words_of(command: Command) -> st.SearchStrategy[list[str]]:
    names = sorted({name for option in command.options for name in option.names})
    values = st.text("0123456789abG:-,@+%=/. \0\u00e9\udc80", max_size=8)
    one = st.one_of(st.sampled_from(names), st.builds("{}={}".format, st.sampled_from(names), values), values)
    return st.lists(one, max_size=5)


@pytest.mark.parametrize(("module", "command"), [(salloc, salloc.COMMAND), (srun_job, srun.COMMAND)])
@given(data=st.data())
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_command_line_of_a_foreground_job_is_served_or_refused(
    module: ModuleType,
    command: Command,
    data: st.DataObject,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(module, "connect", FakeClient)
    monkeypatch.setattr(module, "ForegroundJob", FakeJob)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    words = [word for word in data.draw(words_of(command)) if not word.startswith("--j")]
    code = run(command, salloc.body if module is salloc else srun.body, words)
    shown = capsys.readouterr()
    assert code in (0, 1, 255)
    assert "bug in gpusched" not in shown.err
    assert bool(code) <= bool(shown.err)


def test_a_shell_line_is_submitted_without_loading_anything_heavy() -> None:
    heavy = "re typing json enum dataclasses asyncio msgspec subprocess gpusched.model.spec gpusched.cli.parse".split()
    code = (
        "import sys; import gpusched.addons.slurm.sbatch; "
        f"sys.exit(str([n for n in {heavy} if n in sys.modules] or ''))"
    )
    folders = [folder for folder in sys.path if folder]
    done = subprocess.run(
        [sys.executable, "-IS", "-c", f"import sys; sys.path += {folders!r}; {code}"], capture_output=True, text=True
    )
    assert done.stderr.strip() == ""
