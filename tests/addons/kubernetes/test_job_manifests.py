"""`gsub job.yaml`: what is kept of a Kubernetes Job, what is noted, what is refused by its path, and hostile files."""

from __future__ import annotations

import copy
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from shell import Shell

from gpusched.addons.kubernetes import manifest_reader
from gpusched.cli.slurm_options import NOTES
from gpusched.errors import GpuschedError, Refused

SCHEMA = json.loads((Path(__file__).parent / "job-1.36.json").read_text())

# The example of Kubernetes' documentation in shape, with what `kubectl get job -o yaml` adds.
PLAIN = """\
apiVersion: batch/v1
kind: Job
metadata:
  name: pi
spec:
  backoffLimit: 4
  template:
    spec:
      containers:
      - name: pi
        command: ["perl", "-Mbignum=bpi", "-wle", "print bpi(2000)"]
      restartPolicy: Never
"""
FILLED_IN = {
    "metadata": {"creationTimestamp": None, "generation": 1, "uid": "u", "resourceVersion": "7", "labels": {"a": "b"}},
    "spec": {
        "completionMode": "NonIndexed",
        "completions": 1,
        "parallelism": 1,
        "suspend": False,
        "manualSelector": False,
        "podReplacementPolicy": "TerminatingOrFailed",
        "template": {
            "metadata": {"labels": {"x": "y"}, "creationTimestamp": None},
            "spec": {
                "dnsPolicy": "ClusterFirst",
                "schedulerName": "default-scheduler",
                "securityContext": {},
                "containers": [
                    {
                        "imagePullPolicy": "IfNotPresent",
                        "resources": {},
                        "stdin": False,
                        "terminationMessagePath": "/dev/termination-log",
                        "terminationMessagePolicy": "File",
                    }
                ],
            },
        },
    },
    "status": {"active": 1, "conditions": []},
}
MAIN = "spec.template.spec.containers[0]"


def merged(base: Any, more: Any) -> Any:
    if isinstance(base, dict) and isinstance(more, dict):
        return {**base, **{key: merged(base.get(key), value) for key, value in more.items()}}
    if isinstance(base, list) and isinstance(more, list) and base and more:
        return [merged(base[0], more[0]), *more[1:]]
    return copy.deepcopy(more)


def job(path: str = "", value: Any = None) -> bytes:
    """The plain Job with one path set to a value."""
    document = yaml.safe_load(PLAIN)
    if path:
        more: Any = value
        for key in reversed(path.replace("[0]", ".[0]").split(".")):
            more = [more] if key == "[0]" else {key: more}
        document = merged(document, more)
    return json.dumps(document).encode()


def read(content: bytes, *, ignore_image: bool = False) -> dict[str, Any]:
    return manifest_reader.read_job(content, "job.yaml", [], ignore_image=ignore_image)


def refusal(content: bytes) -> str:
    with pytest.raises(Refused) as error:
        read(content)
    assert all(one.hint for one in (error.value.mistakes or (error.value,)))
    return str(error.value)


def outcome(content: bytes) -> tuple[dict[str, Any] | None, str]:
    """The options of a file, or what it is refused with."""
    try:
        return read(content)["values"], ""
    except Refused as error:
        return None, str(error)


BASE = {"name": "pi", "retries": 4, "requeue": False}


def test_the_plain_job_is_a_command() -> None:
    argv = ["perl", "-Mbignum=bpi", "-wle", "print bpi(2000)"]
    assert read(PLAIN.encode()) == {"argv": argv, "values": BASE}
    assert read(("---\n" + PLAIN + "---\n").encode()) == {"argv": argv, "values": BASE}
    assert read(b"\xef\xbb\xbf" + PLAIN.encode()) == {"argv": argv, "values": BASE}


def test_what_a_cluster_fills_in_says_nothing() -> None:
    assert read(json.dumps(merged(yaml.safe_load(PLAIN), FILLED_IN)).encode()) == read(PLAIN.encode())


POD = "spec.template.spec"


@pytest.mark.parametrize(
    ("path", "value", "fields"),
    [
        ("metadata.name", "x", {"name": "x"}),
        ("metadata.annotations.gpusched/name", "My Job", {"name": "My Job"}),
        ("metadata.annotations.gpusched/comment", "hi", {"comment": "hi"}),
        ("metadata.labels.gpusched/account", "bio", {"account": "bio"}),
        ("metadata.labels", {"kueue.x-k8s.io/queue-name": "vision"}, {"queue": "vision"}),
        ("spec.backoffLimit", 0, {"retries": 0}),
        ("spec.backoffLimit", None, {"retries": 6}),
        ("spec.backoffLimit", 5000, {"retries": 1000}),
        ("spec.suspend", True, {"hold": True}),
        ("spec.parallelism", 0, {"hold": True}),
        (f"{POD}.activeDeadlineSeconds", 90, {"time_limit_s": 90}),
        (f"{POD}.terminationGracePeriodSeconds", 5, {"grace_s": 5}),
        (f"{POD}.priorityClassName", "high", {"qos": "high"}),
        (f"{POD}.nodeName", "lab1", {"nodelist": ("lab1",)}),
        (f"{POD}.nodeSelector", {"kubernetes.io/hostname": "lab1"}, {"nodelist": ("lab1",)}),
        (f"{POD}.restartPolicy", "OnFailure", {}),
        (f"{MAIN}.workingDir", "/srv", {"work_dir": "/srv"}),
        (f"{MAIN}.image", "IMAGE", {}),
        (f"{MAIN}.image", "pytorch", {"image": "pytorch"}),
        (f"{MAIN}.resources.limits", {"cpu": "500m"}, {"cpus": 0.5}),
        (f"{MAIN}.resources.limits", {"cpu": 4}, {"cpus": 4.0}),
        (f"{MAIN}.resources.requests", {"cpu": "2.5"}, {"cpus": 2.5}),
        (f"{MAIN}.resources.limits", {"memory": "8Gi"}, {"mem_mib": 8192}),
        (f"{MAIN}.resources.limits", {"memory": "1G"}, {"mem_mib": 954}),
        (f"{MAIN}.resources.limits", {"memory": 1048577}, {"mem_mib": 2}),
        (f"{MAIN}.resources.limits", {"memory": "1e9"}, {"mem_mib": 954}),
        (f"{MAIN}.resources.limits", {"nvidia.com/gpu": 2}, {"gpus": 2}),
        (f"{MAIN}.resources.limits", {"nvidia.com/gpu": "0"}, {}),
        (f"{MAIN}.resources.limits", {"nvidia.com/mig-1g.10gb": "1"}, {"gpus": 1, "gpu_type": "1g.10gb"}),
        (f"{MAIN}.resources", {"limits": {"cpu": "1"}, "requests": {"cpu": "1000m"}}, {"cpus": 1.0}),
        (f"{MAIN}.env", [{"name": "A", "value": "1"}, {"name": "B", "value": "$(A)$(C)$$(A)"}, {"name": "N"}],
         {"extra_env": {"A": "1", "B": "1$(C)$(A)", "N": ""}}),
    ],
)  # fmt: skip
def test_paths_become_fields(path: str, value: Any, fields: dict[str, Any]) -> None:
    assert read(job(path, value))["values"] == {**BASE, **fields}


@pytest.mark.parametrize(
    ("path", "value", "field", "note"),
    [
        ("spec.ttlSecondsAfterFinished", 60, {}, "spec.ttlSecondsAfterFinished has no effect: ended jobs are kept"),
        ("spec.activeDeadlineSeconds", 60, {"time_limit_s": 60}, "spec.activeDeadlineSeconds is taken as the limit of"),
        ("metadata.namespace", "ml", {}, "metadata.namespace has no effect: there are no namespaces"),
        (f"{POD}.serviceAccountName", "me", {}, f"{POD}.serviceAccountName has no effect: the job runs as you"),
        (f"{POD}.tolerations", [{"operator": "Exists"}], {}, f"{POD}.tolerations has no effect"),
        (f"{MAIN}.resources", {"limits": {"memory": "2Gi"}, "requests": {"memory": "1Gi"}}, {"mem_mib": 2048},
         f"{MAIN}.resources.limits.memory is booked; its lower request has no effect"),
        (f"{MAIN}.resources.limits", {"ephemeral-storage": "1Gi"}, {}, "disk space is not booked"),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_noted(path: str, value: Any, field: dict[str, Any], note: str) -> None:
    values = read(job(path, value))["values"]
    (found,) = values.pop(NOTES)
    assert note in found
    assert values == {**BASE, **field}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("kind", "CronJob", "apiVersion and kind are batch/v1 CronJob; gsub reads a batch/v1 Job"),
        ("apiVersion", "batch/v1beta1", "apiVersion and kind are batch/v1beta1 Job"),
        ("kind", None, "apiVersion and kind are batch/v1 none"),
        ("kind", ["Job"], "kind must be a string, not a list"),
        ("metadata", "pi", "metadata must be a map, not a string"),
        ("metadata.labels.a", 1, "metadata.labels.a must be a string, not a number"),
        ("spec", ["x"], "spec must be a map, not a list"),
        ("spec.backoffLimit", "4", "spec.backoffLimit must be a whole number, not a string"),
        ("spec.backoffLimit", True, "spec.backoffLimit must be a whole number, not true or false"),
        ("spec.backoffLimit", -1, "spec.backoffLimit is -1; it must be from 0"),
        ("spec.suspend", 1, "spec.suspend must be true or false, not a number"),
        ("spec.completions", 4, "spec.completions above 1 is not supported without completionMode: Indexed"),
        ("spec.parallelism", 4, "spec.parallelism above 1 is not supported without completionMode: Indexed"),
        ("spec.completionMode", "Indexed", "spec.completions is missing"),
        ("spec.completionMode", "Twice", "spec.completionMode is Twice"),
        ("spec.maxFailedIndexes", 1, "spec.maxFailedIndexes is for completionMode: Indexed"),
        ("spec.successPolicy", {"rules": [1]}, "spec.successPolicy is not supported"),
        ("spec.podFailurePolicy", {"rules": [{"action": "FailJob"}]}, "spec.podFailurePolicy.rules are not supported"),
        ("spec.retries", 3, "spec.retries is not supported"),
        (f"{POD}.volumes", [{"name": "v"}], f"{POD}.volumes is not supported"),
        (f"{POD}.initContainers", [{"name": "v"}], f"{POD}.initContainers is not supported"),
        (f"{POD}.nodeSelector", {"gpu": "a100"}, f"{POD}.nodeSelector.gpu is not supported"),
        (f"{POD}.affinity", {"podAffinity": {}}, f"{POD}.affinity is not supported"),
        (f"{POD}.affinity", {"nodeAffinity": [1]}, f"{POD}.affinity is not supported"),
        (f"{POD}.securityContext", {"runAsUser": 0}, f"{POD}.securityContext is not supported"),
        (f"{POD}.hostUsers", True, f"{POD}.hostUsers is not supported"),
        (f"{POD}.restartPolicy", "Always", f"{POD}.restartPolicy is Always, which no Job has"),
        (f"{POD}.activeDeadlineSeconds", 0, f"{POD}.activeDeadlineSeconds is 0; it must be from 1"),
        (f"{POD}.containers", "x", f"{POD}.containers must be a list"),
        (f"{POD}.containers[0]", 4, f"{POD}.containers[0] must be a map, not a number"),
        (f"{MAIN}.command", None, f"{MAIN}.command is missing"),
        (f"{MAIN}.command", "python", f"{MAIN}.command must be a list, not a string"),
        (f"{MAIN}.args", [1], f"{MAIN}.args[0] must be a string, not a number"),
        (f"{MAIN}.volumeMounts", [{"name": "v"}], f"{MAIN}.volumeMounts is not supported"),
        (f"{MAIN}.envFrom", [{"secretRef": {"name": "s"}}], f"{MAIN}.envFrom is not supported"),
        (f"{MAIN}.env", [{"name": "A", "value": 1}], f"{MAIN}.env[0].value must be a string, not a number"),
        (f"{MAIN}.env", [{"name": "A", "value": True}], f"{MAIN}.env[0].value must be a string, not true or false"),
        (f"{MAIN}.env", [{"name": "A=B", "value": ""}], f"{MAIN}.env[0].name is not the name of a variable"),
        (f"{MAIN}.env", [{"value": ""}], f"{MAIN}.env[0].name is not the name of a variable"),
        (f"{MAIN}.env", [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s"}}}],
         f"{MAIN}.env[0].valueFrom is not supported"),
        (f"{MAIN}.livenessProbe", {"exec": {"command": ["x"]}}, f"{MAIN}.livenessProbe is not supported"),
        (f"{MAIN}.tty", True, f"{MAIN}.tty is not supported"),
        (f"{MAIN}.workingDir", "sub", f"{MAIN}.workingDir is not absolute"),
        (f"{MAIN}.resources.limits", {"cpu": "many"}, f"{MAIN}.resources.limits.cpu is many, which is not an amount"),
        (f"{MAIN}.resources.limits", {"cpu": -1}, f"{MAIN}.resources.limits.cpu is -1, which is not an amount"),
        (f"{MAIN}.resources.limits", {"cpu": True}, f"{MAIN}.resources.limits.cpu is true, which is not an amount"),
        (f"{MAIN}.resources.limits", {"cpu": {}}, f"{MAIN}.resources.limits.cpu is a map, which is not an amount"),
        (f"{MAIN}.resources.limits", {"cpu": "1e999"}, "which is not an amount"),
        (f"{MAIN}.resources.limits", {"memory": "9E"}, "is more memory than any node has"),
        (f"{MAIN}.resources.limits", {"nvidia.com/gpu": "0.5"}, "nvidia.com/gpu is not a number of GPUs"),
        (f"{MAIN}.resources.limits", {"amd.com/gpu": 1}, f"{MAIN}.resources.limits.amd.com/gpu is not supported"),
        (f"{MAIN}.resources.limits", {"nvidia.com/gpu": 1, "nvidia.com/mig-1g.10gb": 1}, "is a second kind of GPU"),
        (f"{MAIN}.resources.claims", [{"name": "c"}], f"{MAIN}.resources.claims is not supported"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_by_its_path(path: str, value: Any, message: str) -> None:
    assert message in refusal(job(path, value))


def test_every_field_of_the_schema_is_kept_noted_or_refused() -> None:
    """No field of a Job, pod or container passes silently, other than those that a cluster fills in."""
    kept = set()
    parts = {"spec": "JobSpec", POD: "PodSpec", MAIN: "Container", "metadata": "ObjectMeta"}
    for prefix, kind in parts.items():
        for name, schema in SCHEMA["$defs"][kind]["properties"].items():
            path = f"{prefix}.{name}"
            if path in ("spec.template", f"{POD}.containers"):
                continue
            value: Any = {"integer": 7, "string": "x", "boolean": True, "array": [{"odd": 1}]}.get(
                schema.get("type", ""), {"odd": "1"}
            )
            values, text = outcome(job(path, value))
            assert values is not None or path in text, path
            if values == BASE:
                kept.add(path)
    assert kept <= manifest_reader._SILENT | {"metadata.generateName", f"{MAIN}.image"}


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_bytes(job(f"{MAIN}.volumeMounts", [{"name": "v"}]).replace(b'"Never"', b"3"))
    done = Shell(tmp_path / "no-daemon", tmp_path).type("gsub", "job.yaml")
    assert done.code == 1
    assert done.err.count("gsub: error: job.yaml: ") == 2


def indexed(**env: Any) -> bytes:
    document = yaml.safe_load(PLAIN)
    document["spec"].update(completionMode="Indexed", completions=10, parallelism=2, backoffLimitPerIndex=1)
    document["spec"]["template"]["spec"]["containers"][0]["env"] = [
        {"name": name, **({"value": value} if isinstance(value, str) else {"valueFrom": value})}
        for name, value in env.items()
    ]
    return json.dumps(document).encode()


def test_an_indexed_job_is_an_array_with_its_index() -> None:
    found = read(indexed())
    assert found["values"] == {**BASE, "retries": 1, "array": "0-9%2"}
    assert found["argv"][:4] == [
        "/bin/sh",
        "-c",
        'export JOB_COMPLETION_INDEX="$GPUSCHED_ARRAY_TASK_ID"; exec "$@"',
        "sh",
    ]
    done = subprocess.run(
        [*found["argv"][:4], "sh", "-c", "echo $JOB_COMPLETION_INDEX $0", "a b"],
        env={"PATH": "/usr/bin:/bin", "GPUSCHED_ARRAY_TASK_ID": "7"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "7 a b\n"


def test_a_variable_with_the_index_has_the_number_of_the_task() -> None:
    path = "metadata.labels['batch.kubernetes.io/job-completion-index']"
    found = read(indexed(RANK={"fieldRef": {"fieldPath": path, "apiVersion": "v1"}}))
    assert 'export JOB_COMPLETION_INDEX="$GPUSCHED_ARRAY_TASK_ID" RANK="$GPUSCHED_ARRAY_TASK_ID"' in found["argv"][2]
    refused = refusal(indexed().replace(b"print bpi(2000)", b"$(JOB_COMPLETION_INDEX)"))
    assert f"{MAIN}.command has $(JOB_COMPLETION_INDEX), which is not supported" in refused


def test_an_image_is_ignored_on_request_alone() -> None:
    assert read(job(f"{MAIN}.image", "pytorch"), ignore_image=True)["values"] == BASE


# --- hostile and broken files -----------------------------------------------------------------------------

BOMB = b"a: &a [x,x,x,x]\n" + b"".join(
    b"%c: &%c [*%c,*%c,*%c,*%c]\n" % (c, c, c - 1, c - 1, c - 1, c - 1) for c in range(98, 120)
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "job.yaml is empty"),
        (b"# nothing\n", "job.yaml is empty"),
        (b"---\n---\n", "job.yaml is empty"),
        (b"3", "the document must be a map, not a number"),
        (b"[]", "the document must be a map, not a list"),
        (PLAIN.encode() + b"---\n" + PLAIN.encode(), "job.yaml holds 2 documents"),
        (
            PLAIN.encode().replace(b"  name: pi\n", b"  name: pi\n  name: pi2\n", 1),
            "line 5: the key 'name' is given twice",
        ),
        (BOMB, "line 2: the alias *a is not supported"),
        (b"a: &a\n  <<: *a\n", "the alias *a is not supported"),
        (b"a: [", "job.yaml, line 1: "),
        (b"a: b: c", "job.yaml, line 1: "),
        (b"\ta: b", "job.yaml, line 1: "),
        (b"a: !!python/object/apply:os.system [id]", "could not determine a constructor"),
        (b"a: !!bool maybe", "is not YAML"),
        (b"a: !!int ''", "is not YAML"),
        (b"a: !!timestamp x", "is not YAML"),
        (b"a: 2026-99-99", "is not YAML"),
        (b"? [a]\n: b", "unhashable key"),
        (b"\xff\xfea\x00", "job.yaml is not UTF-8: byte 1"),
        (b"a: \x00", "job.yaml is not YAML"),
        (b"[" * 100_000, "nested too deeply"),
        (b"{a: " * 100_000, "nested too deeply"),
        (b"- " * 100_000, "nested too deeply"),
        (b"a" * ((1 << 20) + 1), "job.yaml is larger than 1 MiB"),
        (PLAIN.encode().replace(b"backoffLimit: 4", b"backoffLimit: 0x" + b"f" * 9000), "a number of many digits"),
        (PLAIN.encode().replace(b"backoffLimit: 4", b"backoffLimit: 2026-01-01"), "not a date or binary"),
        (PLAIN.encode().replace(b"name: pi", b"name: !!binary aGk="), "metadata.name must be a string, not a date or"),
        (PLAIN.encode().replace(b"name: pi", b"1: pi"), "metadata.1 is not supported"),
    ],
)
def test_a_broken_file_is_a_sentence(content: bytes, message: str) -> None:
    begun = time.process_time()
    assert message in refusal(content)
    assert time.process_time() - begun < 20


@given(st.binary(max_size=200) | st.text(alphabet="abc:-[]{}&*!|>'\"%@#?, \n\t01", max_size=80).map(str.encode))
def test_no_bytes_are_a_traceback(content: bytes) -> None:
    with pytest.raises(GpuschedError):
        read(content)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KINDS = {"metadata": "ObjectMeta", "spec": "JobSpec", POD: "PodSpec", MAIN: "Container"}
KINDS[f"{MAIN}.resources"] = "ResourceRequirements"
PATHS = [f"{prefix}.{name}" for prefix, kind in KINDS.items() for name in SCHEMA["$defs"][kind]["properties"]]


@given(st.sampled_from(PATHS), JSON_VALUES)
def test_no_value_of_any_path_is_a_traceback(path: str, value: Any) -> None:
    try:
        found = read(job(path, value))
    except Refused:
        return
    json.dumps(found)


# --- as users type it -------------------------------------------------------------------------------------


def test_a_job_file_is_submitted_and_runs(sh: Shell, tmp_path: Path) -> None:
    document = yaml.safe_load(PLAIN)
    main = document["spec"]["template"]["spec"]["containers"][0]
    main.update(command=["/bin/sh", "-c"], args=["echo $GREETING $JOB_COMPLETION_INDEX"], image="busybox")
    main["env"] = [{"name": "GREETING", "value": "hello"}]
    main["resources"] = {"limits": {"nvidia.com/gpu": 1, "memory": "1Gi", "cpu": "500m"}}
    document["spec"].update(completionMode="Indexed", completions=2, backoffLimitPerIndex=0, ttlSecondsAfterFinished=9)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(document))
    done = sh.type("gsub", "-J", "mine", "--parsable", "--wait", "--ignore-image", "-o", "out-%a", "job.yaml")
    assert done.code == 0, done
    shown = json.loads(sh.ok("gshow", "--json", done.out.strip()))["jobs"][0]
    assert (shown["name"], shown["cpus"], shown["mem_mib"], shown["gpus_per_node"]) == ("mine", 0.5, 1024, 1)
    assert [(tmp_path / f"out-{task}").read_text() for task in (0, 1)] == ["hello 0\n", "hello 1\n"]


def test_a_printed_job_submits_as_the_job_itself(sh: Shell, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        '#!/bin/bash\n#GSUB -c 2 -m 1G -t 10\necho "$# $1 $A $(echo $SLURM_ARRAY_TASK_ID)" \\$$\n'
    )
    (tmp_path / "run.yml").write_text(sh.ok("gsub", "--print", "k8s", "-a", "0-1", "-E", "A=$(B)", "run.sh", "a b"))
    ids = [
        sh.submit("-o", "own-%a", "-a", "0-1", "-E", "A=$(B)", "run.sh", "a b"),
        sh.submit("-o", "back-%a", "run.yml"),
    ]
    assert sh.type("gwait", *ids).code == 0
    own, back = (json.loads(sh.ok("gshow", "--json", one))["jobs"][0] for one in ids)
    same = ("name", "cpus", "mem_mib", "time_limit_s", "array", "command", "requeue", "retries")
    assert {key: own.get(key) for key in same} == {key: back.get(key) for key in same}
    for task in (0, 1):
        texts = [(tmp_path / f"{name}-{task}").read_text() for name in ("own", "back")]
        assert texts == [f"1 a b $(B) {task} $$\n"] * 2


def test_a_script_with_such_an_ending_is_still_a_script(sh: Shell, tmp_path: Path) -> None:
    (tmp_path / "odd.yaml").write_text("#!/bin/sh\necho fine\n")
    assert sh.type("gsub", "--wait", "odd.yaml").code == 0


@pytest.mark.parametrize(("size", "limit"), [(1 << 40, "96 MiB"), (2 << 20, "1 MiB")])
def test_a_huge_file_is_refused_without_being_read(tmp_path: Path, size: int, limit: str) -> None:
    with open(tmp_path / "huge.yaml", "wb") as file:
        file.truncate(size)
    done = Shell(tmp_path / "no-daemon", tmp_path).type("gsub", "huge.yaml")
    assert (done.code, done.err.count("\n")) == (1, 2)
    assert f"huge.yaml is larger than {limit}" in done.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["job.yaml", "more"], "job.yaml is a Kubernetes Job, which takes no argument more"),
        (["none.yaml"], "there is no script none.yaml"),
        (["--ignore-image", "run.sh"], "--ignore-image is for a Kubernetes Job"),
    ],
)
def test_mistakes_at_the_prompt_are_sentences(words: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(PLAIN)
    done = Shell(tmp_path / "no-daemon", tmp_path).type("gsub", *words)
    assert done.code in (1, 2)
    assert message in done.err
