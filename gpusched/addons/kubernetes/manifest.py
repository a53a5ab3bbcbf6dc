"""A submission as a manifest for Kubernetes: one `batch/v1` Job with one container. Source: Kubernetes 1.36.

The time limit is the pod's `activeDeadlineSeconds`, as it is of each run and begins with it; that of the Job begins
while it waits for GPUs, and is for all attempts together.
"""

from __future__ import annotations

from gpusched.addons.kubernetes.program import first_words, is_shell, job_name, named_environment
from gpusched.addons.slurm.handover.losses import is_mig
from gpusched.errors import Refused
from gpusched.model.units import MAX_SECONDS, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.cli.parse import Values
    from gpusched.model.layout import Arrangement

    Json = dict[str, Any]

NO_IMAGE = "IMAGE"
"""In place of an image; never the name of one, which has small letters."""
GPU, MIG = "nvidia.com/gpu", "nvidia.com/mig-"
QUEUE = "kueue.x-k8s.io/queue-name"
"""The label that Kueue, the queue of Kubernetes, reads."""
HOSTNAME = "kubernetes.io/hostname"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
TASK_VARIABLES = ("GPUSCHED_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_ID")
SCRIPT_VARIABLE = "GPUSCHED_SCRIPT"
LAUNCHER = 'f=$(mktemp) && printf %s "$GPUSCHED_SCRIPT" >"$f" && chmod 700 "$f" && exec "$f" "$@"'
"""Runs a script that no shell reads, which the container has in a variable."""
DISRUPTION = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
"""Repeat what was lost to the machine without counting it: `--requeue`."""
ANNOTATIONS = {"name": "gpusched/name", "comment": "gpusched/comment", "wckey": "gpusched/wckey"}
ACCOUNT = "gpusched/account"
MAX_WORD = 131_071
"""Bytes of an argument or variable that the kernel passes to a program."""


def manifest(spec: Json, values: Values, layout: Arrangement, image: str) -> Json:
    """The Job. Raises: Refused.

    Args: spec: fields as gsub sends them, with a `work_dir` only if one was named; layout: amounts on the one node.
    """
    name = job_name(spec)
    labels: dict[str, str] = {}
    annotations = {ANNOTATIONS[key]: spec[key] for key in ("comment", "wckey") if spec.get(key)}
    if name != (short := object_name(name)):
        annotations[ANNOTATIONS["name"]] = name
    for key, label in (("account", ACCOUNT), ("queue", QUEUE)):
        if word := spec.get(key):
            (labels if _is_label(word) else annotations)[label] = word
    metadata: Json = {"name": short}
    if labels:
        metadata["labels"] = labels
    if annotations:
        metadata["annotations"] = annotations
    job: Json = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata}
    job["spec"] = {**_repetition(spec), "template": {"spec": _pod(spec, values, layout, image)}}
    for text in _texts(job):
        _check_text(text)
    return job


def object_name(name: str) -> str:
    """A name that Kubernetes accepts for a Job, with room for the number of a task."""
    small = "".join(char if char.isascii() and char.isalnum() else "-" for char in name.lower())
    return small[:52].strip("-") or "job"


def _is_label(word: str) -> bool:
    marks = word.replace("-", "").replace("_", "").replace(".", "")
    return len(word) <= 63 and marks.isascii() and marks.isalnum() and word[0].isalnum() and word[-1].isalnum()


def _repetition(spec: Json) -> Json:
    retries = spec.get("retries") or 0
    found: Json = {}
    if array := spec.get("array"):
        from gpusched.model.tasks import tasks_of  # few jobs are arrays

        tasks, _, throttle = array.partition("%")
        count = len(tasks_of(tasks))
        found = {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": min(count, int(throttle or count)),
            "backoffLimitPerIndex": retries,
        }
        if spec.get("max_fails") is not None:
            found["maxFailedIndexes"] = min(spec["max_fails"], count)
    else:
        found = {"backoffLimit": retries}
    if spec.get("requeue", True):
        found["podFailurePolicy"] = {"rules": [DISRUPTION]}
    if spec.get("hold"):
        found["suspend"] = True
    return found


def _pod(spec: Json, values: Values, layout: Arrangement, image: str) -> Json:
    pod: Json = {"restartPolicy": "Never"}
    limit = spec.get("time_limit_s")
    if isinstance(limit, int):
        pod["activeDeadlineSeconds"] = min(limit, MAX_SECONDS)
    if spec.get("grace_s") is not None:
        pod["terminationGracePeriodSeconds"] = -int(-spec["grace_s"] // 1)
    if spec.get("qos"):
        pod["priorityClassName"] = spec["qos"]
    nodes = [
        {"key": HOSTNAME, "operator": operator, "values": list(spec[key])}
        for key, operator in (("nodelist", "In"), ("exclude", "NotIn"))
        if spec.get(key)
    ]
    if nodes:
        required = {"nodeSelectorTerms": [{"matchExpressions": nodes}]}
        pod["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    return {**pod, "containers": [_container(spec, values, layout, image)]}


def _container(spec: Json, values: Values, layout: Arrangement, image: str) -> Json:
    command = _command(spec)
    env: list[Json] = [{"name": key, "value": escaped(text)} for key, text in named_environment(values).items()]
    if spec.get("script") is not None and not is_shell(spec["script"]):
        env.append({"name": SCRIPT_VARIABLE, "value": escaped(spec["script"])})
    found: Json = {"name": "main", "image": image or NO_IMAGE, "command": [escaped(word) for word in command]}
    if spec.get("script") is not None and spec.get("argv"):
        found["args"] = [escaped(word) for word in spec["argv"]]
    if spec.get("work_dir"):
        found["workingDir"] = spec["work_dir"]
    if spec.get("array"):
        env += [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": INDEX}}} for name in TASK_VARIABLES]
    if env:
        found["env"] = env
    if amounts := _amounts(spec, layout):
        found["resources"] = amounts
    return found


def _command(spec: Json) -> list[str]:
    script = spec.get("script")
    if script is None:
        return list(spec["argv"])
    name = str(spec.get("script_name") or "script")
    if is_shell(script):
        return [*first_words(script), "-c", script, name]
    return ["/bin/sh", "-c", LAUNCHER, name]


def _amounts(spec: Json, layout: Arrangement) -> Json:
    booked: Json = {}
    if ("cpus" in spec or "cpus_per_gpu" in spec) and layout.cpus:
        booked["cpu"] = cores(layout.cpus)
    if layout.mem_mib:
        booked["memory"] = f"{layout.mem_mib // 1024}Gi" if not layout.mem_mib % 1024 else f"{layout.mem_mib}Mi"
    gpus: Json = {}
    if layout.gpus:
        kind = spec.get("gpu_type") or ""
        gpus[f"{MIG}{kind}" if is_mig(kind) else GPU] = str(layout.gpus)
    # Of GPUs, Kubernetes takes the request from the limit.
    return {key: found for key, found in (("requests", booked), ("limits", {**booked, **gpus})) if found}


def cores(cpus: float) -> str:
    """A number of cores: `4`, `500m`."""
    milli = -int(-cpus * 1000 // 1)
    return f"{milli}m" if milli % 1000 else str(milli // 1000)


def escaped(text: str) -> str:
    """A text that a pod gets unchanged: `$(NAME)` would be replaced by a variable, and `$$` by `$`."""
    return "".join(
        "$$" if char == "$" and text[at + 1 : at + 2] in ("$", "(") else char for at, char in enumerate(text)
    )


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for key, item in value.items() for text in (key, *_texts(item))]
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []


def _check_text(text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise Refused(
            f"{printable(text, 60)} is not UTF-8, as a Kubernetes Job has to be", "convert it with iconv"
        ) from None
    if "\0" in text:
        raise Refused(f"{printable(text, 60)} holds a NUL byte", "remove it")
    if size > MAX_WORD:
        raise Refused(
            f"a text of {size >> 10} KiB cannot be expressed in a Kubernetes Job, at most {MAX_WORD >> 10}",
            "put the script into the image, and run it with: gsub --print k8s -- COMMAND",
        )
