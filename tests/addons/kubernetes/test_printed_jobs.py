"""`gsub --print`: the script and the manifest, what they cannot say, and that each says what gsub would submit."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from shell import Shell, compare

from gpusched.addons.kubernetes import export, manifest_reader
from gpusched.addons.kubernetes.manifest import escaped
from gpusched.addons.kubernetes.yaml_text import yaml_text
from gpusched.addons.slurm import sbatch
from gpusched.addons.slurm.handover.losses import HANDOVER, K8S, LOSSES, NOTHING, SBATCH, losses_of
from gpusched.addons.slurm.request import JobRequest
from gpusched.cli import gsub, submission
from gpusched.cli.job_options import ONLY_TYPED, gsub_table
from gpusched.cli.parse import parse
from gpusched.errors import Refused, UsageError
from gpusched.model.hostlist import expand
from gpusched.model.layout import arrange
from gpusched.model.spec import FIELDS

GOLDEN = Path(__file__).parent / "golden"
SCHEMA = json.loads((Path(__file__).parent / "job-1.36.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)

Spec = dict[str, Any]


def spec_of(words: list[str]) -> Spec:
    """The fields that gsub would send, without environment and default folder."""
    table = gsub_table()
    given_, operands, is_command = parse(table, words)
    program = gsub._what(table, given_, words, operands, is_command)
    return {**submission.spec_of(program.pop("values")), **program}


@pytest.fixture
def printed(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What gsub prints for these words; notes are left to be read from `capfd`."""
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_JOB_ID", "A", "B"):
        monkeypatch.delenv(name, raising=False)

    def run(target: str, *words: str) -> str:
        capfd.readouterr()
        assert gsub.body(["--print", target, *words]) == 0
        sys.stdout.flush()
        return capfd.readouterr().out

    return run


# --- every field is kept or named ------------------------------------------------------------------------

# One line for each field that options of gsub set; `-- true` is the command unless the line has one.
CONDA = tempfile.TemporaryDirectory()
Path(CONDA.name, "conda-meta").mkdir()
EACH_FIELD = {
    "gpus": "-g 2",
    "gpu_fraction": "-g 0.5",
    "gpu_shards": "--gres shard:2",
    "gpu_type": "-g a100:2",
    "vram_mib": "-g 1 --vram 8G",
    "sm_percent": "--sm 30%",
    "prolog": "--prolog /bin/true",
    "epilog": "--epilog /bin/true",
    "min_vram_mib": "-g 1 --min-vram 8G",
    "cpus": "-c 4",
    "engine": "--engine slurm",
    "burst": "--burst",
    "start_when": "--start-when cheap",
    "mem_mib": "-m 8G",
    "nodes": "-N 2",
    "gpus_per_node": "--gpus-per-node 2",
    "gpus_linked": "-g 2 --gpus-linked",
    "resources": "--res scratch=2",
    "licenses": "-L matlab:2,ansys",
    "nodelist": "-w gpu01",
    "exclude": "-x lab2",
    "constraint": "-C nvlink&h100",
    "prefer": "--prefer nvlink",
    "near": "--near data=imagenet",
    "exclusive": "--exclusive",
    "ntasks": "-n 4",
    "ntasks_per_node": "--ntasks-per-node 2",
    "gpus_per_task": "-n 1 --gpus-per-task 2",
    "ntasks_per_gpu": "-g 1 --ntasks-per-gpu 2",
    "cpus_per_gpu": "-g 2 --cpus-per-gpu 4",
    "min_cpus": "-n 2 --mincpus 4",
    "mem_per_gpu_mib": "-g 2 --mem-per-gpu 8G",
    "mem_per_cpu_mib": "-c 4 --mem-per-cpu 2G",
    "nodes_max": "-N 1-2",
    "retries": "--retries 3",
    "backoff_s": "--retries 3 --backoff 20s",
    "backoff_factor": "--retries 3 --backoff-factor 3",
    "backoff_max_s": "--retries 3 --backoff-max 1h",
    "retry_on": "--retries 3 --retry-on oom,3",
    "requeue": "--no-requeue",
    "lost_after_s": "--lost-after 30m",
    "name": "-J 'Train it'",
    "comment": "--comment 'two words: \"quoted\" \\ #1'",
    "wckey": "--wckey paper",
    "time_limit_s": "-t 4h",
    "queue": "-q vision",
    "account": "-A bio",
    "nice": "--nice 5",
    "dependency": "-d singleton",
    "never_satisfied": "-d singleton --kill-on-invalid-dep yes",
    "begin_at": "--begin 2030-01-01T10:00",
    "hold": "-H",
    "qos": "--qos high",
    "reservation": "--reservation course",
    "deadline_at": "--deadline 2030-01-02",
    "fallback": "--fallback 'rm -rf x'",
    "ignore_idle": "--ignore-idle",
    "array": "-a 0-9%2",
    "max_fails": "-a 0-9 --max-fails 3",
    "sweep": "--sweep lr=1,2",
    "notify": "--notify begin,end,fail,preempt,retry,time_limit_80,array_tasks",
    "notify_to": "--notify end --notify-to a@example.org",
    "key": "--key once",
    "work_dir": "-D /srv/data",
    "stdout": "-o 'out %j.txt'",
    "stderr": "-e err-%A_%a",
    "stdin": "-i in.txt",
    "open_mode": "--open-mode append",
    "notice": "--signal B:USR1@90",
    "grace_s": "--grace 2m",
    "gpu_ids": "-g 1 --gpu-ids uuid",
    "venv": f"--venv {shlex.quote(sys.prefix)}",
    "conda": f"--conda {CONDA.name}",
    "ranks": "-n 2 --ranks",
    "log_max_mib": "--log-max 10M",
    "log_keep": "--log-max 10M:5",
    "snapshot": "--snapshot",
    "image": "--image docker.io/library/alpine:3",
    "binds": "--image alpine --bind /data:/data:ro",
    "container_workdir": "--image alpine --container-workdir /src",
}
NOT_OPTIONS = {
    *("argv", "script", "script_name", "script_path", "env", "env_named"),  # the program: tests of their own
    *(
        "umask",
        "stop_signal",
        "slurm",
        "only_holds",
        "submit_dir",
        "submit_line",
        "if_infeasible",
        "throttle",
    ),  # of no option
    *("interactive", "keep", "lease_s"),  # of grun
    "variants",  # refused: neither file can name several requests
}


def test_the_lines_name_every_field_that_gsub_sets() -> None:
    assert EACH_FIELD.keys() | NOT_OPTIONS == FIELDS.keys()
    for name, line in EACH_FIELD.items():
        assert name == "snapshot" or name in spec_of([*shlex.split(line), "--", "true"]), name


AMOUNTS = {"cpus", "gpus", "mem_mib", *("gpus_per_node", "gpus_per_task", "cpus_per_gpu", "mem_per_gpu_mib")}
AMOUNTS |= {"mem_per_cpu_mib", "ntasks", "ntasks_per_node", "ntasks_per_gpu", "nodes"}
PROGRAM = {"argv", "script", "script_name", "name"}
ALWAYS = {
    SBATCH: {"if_infeasible": "wait", "never_satisfied": "wait", "nodes": 1},
    K8S: {"retries": 0, "requeue": True},
}


def read_back(target: str, text: str) -> Spec:
    """The fields that our own reader of the target's files finds."""
    if target == K8S:
        program = manifest_reader.read_job(text.encode(), "job.yaml", [], ignore_image=False)
        return {**submission.spec_of(program.pop("values")), **program}
    request = JobRequest(sbatch.COMMAND, sbatch._OWN)
    sbatch._take_directives(text.encode(), "job.sh", request)
    assert request.notes == []
    return request.spec()


def normal(key: str, value: Any) -> Any:
    if key in ("nodelist", "exclude"):
        return expand(",".join(value))
    if key == "notify":
        return {one for word in value for one in ({"preempt", "retry"} if word == "requeue" else {word})}
    return value


def check_round_trip(target: str, spec: Spec, text: str) -> None:
    """Every field is read back as it was, or the table says that it is lost."""
    found = read_back(target, text)
    lost = {loss.field for loss in losses_of(target, spec)} - {
        "gpu_fraction",
        "gpu_shards",
        "gpu_type",
        "cpus",
        "time_limit_s",
    }
    wanted = {key: value for key, value in spec.items() if key not in PROGRAM | lost}
    if wanted.get("time_limit_s") == "auto" or (target == K8S and wanted.get("time_limit_s") == "unlimited"):
        del wanted["time_limit_s"]
    if target == K8S:
        # Of one pod: what its node books.
        amounts = arrange(wanted, 1.0).amounts()
        stated = {"gpus": "gpus", "mem_mib": "mem", "cpus": "cpus"}
        booked = {
            key: amounts[key] for key, mark in stated.items() if key in amounts and any(mark in k for k in wanted)
        }
        wanted = {key: value for key, value in wanted.items() if key not in AMOUNTS} | booked
        if not wanted.get("gpus"):
            wanted.pop("gpus", None)
    if "sm_percent" in spec:
        wanted["gpu_fraction"] = spec["sm_percent"] / 100
    if "gpu_fraction" in wanted:
        wanted["gpus_per_node" if target == SBATCH else "gpus"] = 1
    for key, value in wanted.items():
        assert normal(key, found[key]) == normal(key, value), key
    more = {key: value for key, value in found.items() if key not in wanted and key not in PROGRAM}
    always = dict(ALWAYS[target])
    if "nodes" in always and {"ntasks", "ntasks_per_node"} <= wanted.keys():
        # As many as the tasks need is what is printed then.
        always["nodes"] = -(-int(wanted["ntasks"]) // int(wanted["ntasks_per_node"]))
    assert more.items() <= always.items()


@pytest.mark.parametrize("target", [SBATCH, K8S])
@pytest.mark.parametrize("name", EACH_FIELD)
def test_each_field_is_read_back_noted_or_refused(
    name: str, target: str, printed: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*shlex.split(EACH_FIELD[name]), "--", "true"]
    spec = spec_of(words)
    of_table = {**spec, "snapshot": True} if name == "snapshot" else spec
    losses = losses_of(target, of_table)
    if refused := [loss for loss in losses if loss.fate == "refused"]:
        with pytest.raises(Refused) as error:
            printed(target, *words)
        for loss in refused:
            assert f"{loss.option} cannot be expressed in " in str(error.value)
            assert loss.why in str(error.value)
        return
    capfd.readouterr()
    assert gsub.body(["--print", target, *words]) == 0
    sys.stdout.flush()
    out, err = capfd.readouterr()
    for loss in losses:
        assert (f"{loss.why}\n" in err) is (loss.fate != NOTHING)
    check_round_trip(target, spec, out)
    if target == K8S:
        VALIDATOR.validate(yaml.safe_load(out))


def kept_lines(target: str) -> list[str]:
    lines = []
    for name, line in EACH_FIELD.items():
        spec = spec_of([*shlex.split(line), "--", "true"])
        # A share of SMs and shards go with no other number of GPUs.
        if name not in ("snapshot", "sm_percent", "gpu_shards") and not any(
            loss.fate == "refused" for loss in losses_of(target, spec)
        ):
            lines.append(line)
    return lines


@pytest.mark.parametrize("target", [SBATCH, K8S])
@given(data=st.data())
def test_any_options_together_are_read_back(target: str, data: st.DataObject) -> None:
    lines = data.draw(st.lists(st.sampled_from(kept_lines(target)), max_size=8, unique=True))
    comment = data.draw(st.text(st.characters(exclude_characters="\0\n\r", exclude_categories=["Cs"])))
    words = ["--comment", comment, *shlex.split(" ".join(lines)), "--", "true"]
    spec = spec_of(words)
    if not spec["comment"]:
        del spec["comment"]
    stdout = sys.stdout
    sys.stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="surrogateescape")
    try:
        gsub.body(["--quiet", "--print", target, *words])
        sys.stdout.flush()
        text = sys.stdout.buffer.getvalue().decode()  # type: ignore[attr-defined]
    except (UsageError, Refused):
        return  # options that contradict each other
    finally:
        sys.stdout = stdout
    check_round_trip(target, spec, text)
    if target == K8S:
        VALIDATOR.validate(yaml.safe_load(text))


# --- the program ------------------------------------------------------------------------------------------

SCRIPT = """#!/bin/bash
#GSUB -g 2
# of the script
#SBATCH --hint=nomultithread
#SBATCH -t 10 -o out

#SBATCH -J named
echo $(date) $$ "$1"
#SBATCH -c 99
"""


def test_a_script_keeps_its_text_and_the_lines_that_only_slurm_reads(
    printed: Callable[..., str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.sh").write_text(SCRIPT)
    capfd.readouterr()
    text = printed(SBATCH, "-t", "20", "train.sh", "one two", "3")
    assert text == (
        "#!/bin/bash\n#SBATCH --job-name=named\n#SBATCH --nodes=1\n#SBATCH --gpus=2\n#SBATCH --time=20:00\n"
        "#SBATCH --output=out\n#SBATCH --hint=nomultithread\nset -- 'one two' 3\n# of the script\n\n"
        'echo $(date) $$ "$1"\n#SBATCH -c 99\n'
    )


def test_a_printed_script_runs_as_the_job_would(printed: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text('#!/bin/sh\n#GSUB -c 2\nprintf "%s|" "$0" "$@"\n')
    for words in (["a.sh", "x y", "$z"], ["--", "printf", "%s|", "x y", "$z"], ["--wrap", "printf '%s|' 'x y' '$z'"]):
        text = printed(SBATCH, *words)
        done = subprocess.run(["/bin/sh", "-s"], input=text, capture_output=True, text=True, check=True)
        assert done.stdout.endswith("x y|$z|")


def test_arguments_of_other_scripts_are_refused_for_sbatch(printed: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("#!/usr/bin/env python3\n#SBATCH -c 2\nprint(1)\n")
    assert "#SBATCH --cpus-per-task=2\nprint(1)\n" in printed(SBATCH, "a.py")
    with pytest.raises(Refused, match="the arguments of a.py cannot be expressed in an sbatch script"):
        printed(SBATCH, "a.py", "1")


@pytest.mark.parametrize(
    "first", ["#!/bin/sh", "#!/bin/bash -eu", "#!/usr/bin/env bash", "#! /bin/zsh ", "#!/usr/bin/env -S bash -e"]
)
@pytest.mark.parametrize("rest", ["echo $$(date) $(A) '$'\n", "true", "\n\n  echo\ttabs \n\n", "é \x07 \u2028\n"])
def test_a_script_comes_back_from_a_manifest(
    first: str, rest: str, printed: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "run.sh").write_text(f"{first}\n{rest}")
    for array in ([], ["-a", "0-3"]):
        text = printed(K8S, *array, "-E", "A=$(B) $$", "-E", "B=1", "run.sh", "$(A)", "two words", "")
        VALIDATOR.validate(yaml.safe_load(text))
        program = manifest_reader.read_job(text.encode(), "job.yaml", [], ignore_image=False)
        assert program.pop("values")["extra_env"] == {"A": "$(B) $$", "B": "1"}
        assert program == {
            "script": f"{first}\n{rest}",
            "script_name": "run.sh",
            "argv": ["$(A)", "two words", ""],
        }


def test_other_scripts_are_started_from_a_variable(printed: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text("#!/usr/bin/env python3\nimport sys; print(sys.argv[1:], '$$')\n")
    text = printed("k8s:python:3.12", "run.py", "a b")
    main = yaml.safe_load(text)["spec"]["template"]["spec"]["containers"][0]
    assert main["image"] == "python:3.12"
    env = {one["name"]: one["value"].replace("$$", "$") for one in main["env"]}
    # As the pod would run it.
    done = subprocess.run(
        [*main["command"][:2], main["command"][2].replace("$$", "$"), main["command"][3], *main["args"]],
        env={"PATH": "/usr/bin:/bin", **env},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("['a b'] $$\n".replace("$$", "$$"), "") or done.returncode == 127
    program = manifest_reader.read_job(text.encode(), "job.yaml", [], ignore_image=True)
    assert program["script"] == (tmp_path / "run.py").read_text()
    assert "extra_env" not in program["values"]


@given(st.text(alphabet="$()AB\\{} "))
def test_a_text_is_the_same_after_kubernetes_replaced_variables(text: str) -> None:
    reader = manifest_reader._Reader(ignore_image=False)
    reader._env = {"A": "1", "B": "2", "AB": "3"}
    assert reader._expanded(escaped(text), "x") == text


VALUES = st.recursive(
    st.text(st.characters(exclude_categories=["Cs"])) | st.integers() | st.booleans(),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, min_size=1, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(min_size=1), VALUES, min_size=1, max_size=3))
def test_written_yaml_is_read_as_it_was(document: Spec) -> None:
    assert yaml.safe_load(yaml_text(document)) == document


# --- as users type it -------------------------------------------------------------------------------------

FULL = (
    "-J Train_A -g 2 -c 8 -m 64G -t 1-12:00 -q vision -A bio --qos high -a 0-9%2 --retries 2 --max-fails 3 "
    "--notify fail,gpu_idle -E A=x,y --export ALL,LANG -o out/%A_%a.txt -w gpu01 -x gpu[02-03] "
    "--comment 'a: b' --grace 2m --signal B:USR1@90 --begin 2030-01-01T10:00"
)


@pytest.mark.parametrize("target", ["sbatch", "k8s", "k8s:pytorch/pytorch:2.9"])
def test_output_is_as_it_was(target: str, tmp_path: Path) -> None:
    sh = Shell(tmp_path / "no-daemon", tmp_path, LANG="C.UTF-8", TZ="UTC")
    (tmp_path / "train.sh").write_text(SCRIPT)
    words = shlex.split(FULL)
    if target != "sbatch":
        words = words[: words.index("--begin")]
    done = sh.type("gsub", "--print", target, *words, "train.sh", "two words")
    assert done.code == 0
    name = f"print-{target.partition(':')[0]}{'-image' * (':' in target)}.txt"
    compare(name, f"{done.out}--- stderr\n{done.err}", GOLDEN)
    # Without a daemon, and without a folder for one.
    assert not (tmp_path / "no-daemon").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--print pbs -- true", "'pbs' is not one of sbatch, k8s, k8s:IMAGE"),
        ("--print sbatch:x -- true", "is not one of"),
        ("--print k8s: -- true", "is not one of"),
        ("--print sbatch --batch f", "--print and --batch were both given"),
        ("--print sbatch --wait -- true", "--print and --wait were both given"),
        ("--print sbatch --dry-run -- true", "--print and --dry-run were both given"),
        ("--print k8s --resubmit 4", "--print and --resubmit were both given"),
        ("--print k8s --dag f", "--print and --dag were both given"),
        ("--print k8s -a 5-1 -- true", "ends before it begins"),
        ("--print k8s -a 1-9 -- true", "an Indexed Job counts 0, 1, 2"),
        ("--print k8s -a 0-9:2 -- true", "an Indexed Job counts 0, 1, 2"),
        ("--print k8s -a 0-100000%5 -- true", "an Indexed Job has at most 100,000 tasks"),
        ("--print k8s -g 1 --vram 8G -m 0 -- true", "--vram cannot be expressed in a Kubernetes Job"),
        ("--print k8s -g 4 --gpus-per-task 2 -- true", "--ntasks cannot be expressed in a Kubernetes Job"),
        ("--print k8s -g 4 --gpus-per-node 2 -- true", "--nodes cannot be expressed in a Kubernetes Job"),
        ("--print sbatch -N 4 -g 3 -- true", "cannot be spread evenly"),
        ("--print sbatch -d afterok:41 -- true", "the cluster has other ids"),
        ("--print sbatch -g a100:0.5 -- true", "gres mps has no types"),
        ("--print sbatch -w lab1,lab2 -- true", "Slurm would take all of these nodes"),
        ("--print sbatch -g 0.333 -- true", "whole percents"),
        ("--print sbatch -- true --print", None),
        (
            "--print sbatch -n 2 job.sh",
            "the tasks of job.sh cannot be expressed in an sbatch script",
        ),
        ("--ignore-image -- true", "--ignore-image is for a Kubernetes Job"),
    ],
)
def test_what_cannot_be_printed_is_a_sentence(words: str, message: str | None, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("#!/bin/sh\ntrue\n")
    done = Shell(tmp_path / "no-daemon", tmp_path).type("gsub", *shlex.split(words))
    assert "Traceback" not in done.err
    if message is None:
        assert done.code == 0
        return
    assert done.code in (1, 2)
    assert done.out == ""
    assert message in done.err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("-n 2 -- train 'a b'", "exec srun train 'a b'"),
        ("--tasks-per-node 2 --wrap 'train; report'", "exec srun /bin/sh -c 'train; report'"),
        ("-g 2 --no-ranks -n 2 -- train", "exec train"),
    ],
)
def test_ranks_are_started_by_srun_in_a_printed_script(words: str, line: str, printed: Callable[..., str]) -> None:
    assert printed(SBATCH, *shlex.split(words)).splitlines()[-1] == line


@pytest.mark.parametrize("target", ["sbatch", "k8s"])
@pytest.mark.parametrize("text", ["a\nb", "a'b\"c,", "\udcff"])
def test_values_that_a_file_cannot_hold_are_a_sentence(target: str, text: str, printed: Callable[..., str]) -> None:
    is_held = (target, text) in {(K8S, "a\nb"), (K8S, "a'b\"c,"), (SBATCH, "\udcff")}
    words = ["-E", f"A={text}", "--", "true"]
    if is_held:
        assert printed(target, *words)
        return
    with pytest.raises(Refused):
        printed(target, *words)


def test_a_script_too_large_for_a_pod_is_refused(printed: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "big.sh").write_text("#!/bin/sh\n" + "#" * 140_000)
    with pytest.raises(Refused, match="a text of 136 KiB cannot be expressed in a Kubernetes Job"):
        printed(K8S, "big.sh")


def test_a_plain_gsub_imports_nothing_of_it() -> None:
    code = "import sys, gpusched.cli.gsub; print(*(n for n in sys.modules if 'jobfile' in n or n == 'yaml'))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == ""


def test_the_table_names_fields_and_options_of_gsub_alone() -> None:
    for loss in LOSSES:
        assert loss.field in FIELDS
        assert [one for one in loss.targets if one != HANDOVER] in ([], [SBATCH], [K8S], [SBATCH, K8S])
        assert loss.is_lost is None or loss.case or loss.field
    assert {"print", "ignore_image"} <= ONLY_TYPED
    assert {name for name in export._ALONE if name != "wait"} <= ONLY_TYPED | {"batch"}
