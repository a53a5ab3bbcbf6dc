"""`gsub job.yaml`: a Kubernetes `batch/v1` Job with one container as a submission. Source: Kubernetes 1.36.

Every path of the file is kept, accepted with a note, or refused by name with what to do; nothing passes silently but
what a cluster fills in by itself. Refusals are reported all at once.
"""

from __future__ import annotations

from gpusched.addons.kubernetes.manifest import (
    ACCOUNT,
    ANNOTATIONS,
    DISRUPTION,
    GPU,
    HOSTNAME,
    LAUNCHER,
    MIG,
    NO_IMAGE,
    QUEUE,
    SCRIPT_VARIABLE,
    TASK_VARIABLES,
)
from gpusched.addons.kubernetes.program import first_words
from gpusched.addons.kubernetes.yaml_text import read_yaml
from gpusched.cli.slurm_options import NOTES
from gpusched.errors import GpuschedError, Refused, UsageError
from gpusched.model.spec import FIELDS
from gpusched.model.units import MAX_MIB, MAX_SECONDS, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    Json = dict[str, Any]

_POD = "spec.template.spec"
_MAIN = f"{_POD}.containers[0]"

WHAT_TO_DO = {
    "spec.manualSelector": "leave it out",
    "spec.managedBy": "leave it out",
    "spec.successPolicy": "wait for the tasks that you need with: gwait",
    f"{_POD}.volumes": "the command sees the files of this machine; use their paths",
    f"{_MAIN}.volumeMounts": "the command sees the files of this machine; use their paths",
    f"{_MAIN}.volumeDevices": "the command sees the files of this machine; use their paths",
    f"{_POD}.initContainers": "put its command before the job's, or submit it first and use: gsub -d afterok:ID",
    f"{_POD}.nodeSelector": "name labels of [node] labels with: gsub -C LABELS",
    f"{_POD}.affinity": "name nodes with: gsub -w NODES, or their labels with: gsub -C LABELS",
    f"{_POD}.topologySpreadConstraints": "leave it out",
    f"{_POD}.securityContext": "a job runs as the user who submits it",
    f"{_POD}.priority": "use priorityClassName, which is the QOS",
    f"{_POD}.resourceClaims": "ask for GPUs with resources.limits",
    f"{_POD}.resources": "set it on the container",
    f"{_POD}.hostUsers": "leave it out",
    f"{_POD}.runtimeClassName": "leave it out",
    f"{_POD}.overhead": "leave it out",
    f"{_MAIN}.envFrom": "give the variables with: env, or gsub -E NAME=VALUE",
    f"{_MAIN}.lifecycle": "put it into the command, with trap for its end",
    f"{_MAIN}.livenessProbe": "let the command watch itself; a time limit is activeDeadlineSeconds",
    f"{_MAIN}.readinessProbe": "leave it out",
    f"{_MAIN}.startupProbe": "leave it out",
    f"{_MAIN}.securityContext": "a job runs as the user who submits it",
    f"{_MAIN}.restartPolicy": "leave it out",
    f"{_MAIN}.stdin": "read a file: gsub -i FILE",
    f"{_MAIN}.tty": "use a foreground job: grun --pty",
}
"""What to do about paths that are refused; of others: leave it out."""

WITHOUT_EFFECT = {
    "metadata.namespace": "there are no namespaces",
    "metadata.finalizers": "ended jobs are kept as [history] says",
    "spec.ttlSecondsAfterFinished": "ended jobs are kept as [history] says",
    "spec.podReplacementPolicy": "a run is repeated when the one before has ended",
    "spec.selector": "the job knows its runs",
    f"{_POD}.serviceAccountName": "the job runs as you",
    f"{_POD}.serviceAccount": "the job runs as you",
    f"{_POD}.automountServiceAccountToken": "there is no service account",
    f"{_POD}.tolerations": "nodes have no taints",
    f"{_POD}.schedulerName": "there is one scheduler",
    f"{_POD}.dnsPolicy": "the job has the network of the machine",
    f"{_POD}.dnsConfig": "the job has the network of the machine",
    f"{_POD}.hostNetwork": "the job has the network of the machine",
    f"{_POD}.hostIPC": "the job runs on the machine",
    f"{_POD}.hostPID": "the job runs on the machine",
    f"{_POD}.hostname": "the job has the name of the machine",
    f"{_POD}.subdomain": "the job has the name of the machine",
    f"{_POD}.enableServiceLinks": "there are no services",
    f"{_POD}.shareProcessNamespace": "there is one container",
    f"{_POD}.preemptionPolicy": "preemption is decided by queue and QOS",
    f"{_MAIN}.ports": "the command may listen on any port",
    f"{_MAIN}.terminationMessagePath": "the output has the message",
    f"{_MAIN}.terminationMessagePolicy": "the output has the message",
    f"{_MAIN}.resizePolicy": "amounts are fixed once the job runs",
}
_SILENT = frozenset(
    {
        *("status", "metadata.creationTimestamp", "metadata.generation", "metadata.managedFields", "metadata.uid"),
        *("metadata.resourceVersion", "metadata.selfLink", "metadata.ownerReferences", "spec.template.metadata"),
        *(f"{_POD}.imagePullSecrets", f"{_MAIN}.imagePullPolicy", f"{_MAIN}.name"),
        # Our own, and those of a cluster's tools: metadata of people and programs.
        *("metadata.labels", "metadata.annotations"),
    }
)
"""What a cluster fills in by itself, or what has a meaning only together with something that is refused."""
_DEFAULTS: dict[str, object] = {
    "spec.selector": None,
    "spec.manualSelector": False,
    "spec.podReplacementPolicy": "TerminatingOrFailed",
    f"{_POD}.dnsPolicy": "ClusterFirst",
    f"{_POD}.schedulerName": "default-scheduler",
    f"{_POD}.hostNetwork": False,
    f"{_POD}.hostIPC": False,
    f"{_POD}.hostPID": False,
    f"{_MAIN}.terminationMessagePath": "/dev/termination-log",
    f"{_MAIN}.terminationMessagePolicy": "File",
    f"{_MAIN}.stdin": False,
    f"{_MAIN}.tty": False,
}
"""Values that say nothing."""
_INDEX_PATHS = tuple(
    f"metadata.{where}['batch.kubernetes.io/job-completion-index']" for where in ("annotations", "labels")
)
_INDEX = "JOB_COMPLETION_INDEX"
_BACKOFF_LIMIT = 6
"""Kubernetes' own, for a Job that says none."""
_NOT_KEPT = "is not supported"


def read_job(content: bytes, name: str, arguments: list[str], *, ignore_image: bool) -> Json:
    """The program of a manifest, and under `values` its options. Raises: Refused, UsageError.

    Args: name: of the file, for errors; arguments: further words of the command line.
    """
    if arguments:
        raise UsageError(
            f"{printable(name)} is a Kubernetes Job, which takes no argument {printable(arguments[0], 40)}",
            "options come before the file: gsub -q fast job.yaml",
        )
    found = _Reader(ignore_image=ignore_image)
    program = found.read(read_yaml(content, name))
    found.check(name)
    values: Json = found.values
    if found.notes:
        values[NOTES] = found.notes
    return {**program, "values": values}


class _Mistakes:
    """Errors and notes of one file."""

    def __init__(self) -> None:
        self.errors: list[GpuschedError] = []
        self.notes: list[str] = []

    def refuse(self, path: str, what: str, hint: str) -> None:
        self.errors.append(Refused(f"{path} {what}", hint))


class _Part:
    """One map of the file; what has not been taken from it is left for `finish`."""

    def __init__(self, content: Mapping[Any, Any], path: str, found: _Mistakes) -> None:
        self._left = dict(content)
        self.path = path
        self._found = found

    def at(self, key: str) -> str:
        """The path of a key."""
        return f"{self.path}.{key}" if self.path else key

    def _take(self, key: str, kind: type, what: str) -> Any:
        value = self._left.pop(key, None)
        if value is None or (isinstance(value, kind) and isinstance(value, bool) is (kind is bool)):
            return value
        self._found.refuse(self.at(key), f"must be {what}, not {_kind_of(value)}", "quote what is a text")
        return None

    def text(self, key: str) -> str | None:
        """A text, None if it is missing or empty."""
        return self._take(key, str, "a string") or None

    def flag(self, key: str) -> bool:
        return bool(self._take(key, bool, "true or false"))

    def number(self, key: str, low: int, high: float) -> int | None:
        """A whole number, None if it is missing or wrong."""
        value: int | None = self._take(key, int, "a whole number")
        if value is not None and not low <= value <= high:
            self._found.refuse(self.at(key), f"is {_shown(value)}; it must be from {low} to {int(high)}", "change it")
            return None
        return value

    def part(self, key: str) -> _Part:
        """A map; an empty one if it is missing or wrong."""
        return _Part(self._take(key, dict, "a map") or {}, self.at(key), self._found)

    def items(self, key: str) -> list[Any]:
        """A list; an empty one if it is missing or wrong."""
        return self._take(key, list, "a list") or []

    def texts(self, key: str) -> list[str]:
        """A list of texts."""
        found = []
        for at, item in enumerate(self.items(key)):
            if isinstance(item, str):
                found.append(item)
            else:
                self._found.refuse(f"{self.at(key)}[{at}]", f"must be a string, not {_kind_of(item)}", 'quote it: "1"')
        return found

    def parts(self, key: str) -> list[_Part]:
        """A list of maps."""
        found = []
        for at, item in enumerate(self.items(key)):
            path = f"{self.at(key)}[{at}]"
            if isinstance(item, dict):
                found.append(_Part(item, path, self._found))
            else:
                self._found.refuse(path, f"must be a map, not {_kind_of(item)}", "see: kubectl explain job")
        return found

    def raw(self, key: str) -> Any:
        """Anything; None if it is missing or says nothing."""
        value = self._left.pop(key, None)
        return None if value in ({}, [], "") else value

    def rest(self) -> dict[str, Any]:
        """All that has not been taken, by key."""
        left, self._left = self._left, {}
        return {str(key): value for key, value in left.items()}

    def finish(self) -> None:
        """Note or refuse what has not been taken."""
        for key, value in self.rest().items():
            path = printable(self.at(key), 200)
            says_nothing = value is None or value in ({}, [], "") or (path in _DEFAULTS and value == _DEFAULTS[path])
            if path in _SILENT or says_nothing:
                continue
            if (why := WITHOUT_EFFECT.get(path)) is not None:
                self._found.notes.append(f"{path} has no effect: {why}")
            else:
                self._found.refuse(path, _NOT_KEPT, WHAT_TO_DO.get(path, "leave it out"))


def _kind_of(value: object) -> str:
    for kind, name in ((bool, "true or false"), (int, "a number"), (float, "a number"), (str, "a string")):
        if isinstance(value, kind):
            return name
    return {dict: "a map", list: "a list", type(None): "nothing"}.get(type(value), "a date or binary")


def _shown(value: object) -> str:
    """A value in an error; a very long number cannot be written, and would be no help."""
    if isinstance(value, str):
        return printable(value, 60)
    if isinstance(value, int):
        return str(value).lower() if abs(value) < 10**20 else "a number of many digits"
    return str(value) if isinstance(value, float) else _kind_of(value)


class _Reader(_Mistakes):
    def __init__(self, *, ignore_image: bool) -> None:
        super().__init__()
        self.values: Json = {}
        self._ignore_image = ignore_image
        self._env: dict[str, str] = {}
        self._of_index: list[str] = []
        """Variables with the number of the task."""

    def check(self, name: str) -> None:
        """Raises: Refused that combines all mistakes."""
        if self.errors:
            raise Refused.of([Refused(f"{printable(name)}: {one.message}", one.hint) for one in self.errors])

    def read(self, document: Any) -> Json:
        """The program; options end up in `values`."""
        if not isinstance(document, dict):
            self.refuse("the document", f"must be a map, not {_kind_of(document)}", _EXAMPLE)
            return {}
        top = _Part(document, "", self)
        kind, version = top.text("kind"), top.text("apiVersion")
        if (kind, version) != ("Job", "batch/v1"):
            shown = f"{printable(version or 'none', 60)} {printable(kind or 'none', 60)}"
            self.refuse("apiVersion and kind", f"are {shown}; gsub reads a batch/v1 Job", _EXAMPLE)
            return {}
        metadata = top.part("metadata")
        self._read_metadata(metadata)
        spec = top.part("spec")
        is_indexed = self._read_repetition(spec)
        template = spec.part("template")
        pod = template.part("spec")
        template.part("metadata")
        self._read_pod(pod)
        program = self._read_containers(pod, is_indexed)
        for part in (template, pod, spec, metadata, top):
            part.finish()
        return program

    def _read_metadata(self, metadata: _Part) -> None:
        known = {**_texts_of(metadata.part("labels"), self), **_texts_of(metadata.part("annotations"), self)}
        name, generated = metadata.text("name"), metadata.text("generateName")
        if found := known.get(ANNOTATIONS["name"]) or name or (generated or "").rstrip("-"):
            self.values["name"] = found
        for key, label in (("comment", ANNOTATIONS["comment"]), ("wckey", ANNOTATIONS["wckey"])):
            if known.get(label):
                self.values[key] = known[label]
        for key, label in (("account", ACCOUNT), ("queue", QUEUE)):
            if known.get(label):
                self.values[key] = known[label]

    def _read_repetition(self, spec: _Part) -> bool:
        """Whether the Job is an array."""
        if spec.flag("suspend"):
            self.values["hold"] = True
        most = FIELDS["retries"].high or 0
        mode = spec.text("completionMode") or "NonIndexed"
        count, at_once = spec.number("completions", 0, 4_000_001), spec.number("parallelism", 0, 1 << 31)
        limit, each = spec.number("backoffLimit", 0, 1 << 31), spec.number("backoffLimitPerIndex", 0, most)
        fails = spec.number("maxFailedIndexes", 0, 4_000_000)
        total = spec.number("activeDeadlineSeconds", 1, MAX_SECONDS)
        if total is not None:
            self.values["time_limit_s"] = total
            self.notes.append(
                "spec.activeDeadlineSeconds is taken as the limit of each run; in a cluster it is that of all runs "
                "and of their wait together"
            )
        self._read_failure_policy(spec)
        if mode not in ("Indexed", "NonIndexed"):
            self.refuse("spec.completionMode", f"is {printable(mode, 40)}, not Indexed or NonIndexed", "use Indexed")
        is_indexed = mode == "Indexed"
        if is_indexed and count:
            at_once = 1 if at_once is None else at_once
            throttle = f"%{at_once}" if 0 < at_once < count else ""
            self.values["array"] = f"0-{count - 1}{throttle}"
            if fails is not None:
                self.values["max_fails"] = fails
        elif is_indexed:
            self.refuse("spec.completions", "is missing: an Indexed Job has a number of tasks", "add completions: 10")
        else:
            for key, number in (("completions", count), ("parallelism", at_once)):
                if number is not None and number > 1:
                    self.refuse(
                        f"spec.{key}", f"above 1 {_NOT_KEPT} without completionMode: Indexed", "add it, for an array"
                    )
            for key, number in (("backoffLimitPerIndex", each), ("maxFailedIndexes", fails)):
                if number is not None:
                    self.refuse(f"spec.{key}", "is for completionMode: Indexed", "leave it out")
        if at_once == 0:
            self.values["hold"] = True
        if each is not None:
            limit = each
        elif is_indexed:
            self.notes.append("spec.backoffLimit is taken as the retries of each task; in a cluster it is that of all")
        self.values["retries"] = min(_BACKOFF_LIMIT if limit is None else limit, int(most))
        return is_indexed

    def _read_failure_policy(self, spec: _Part) -> None:
        policy = spec.part("podFailurePolicy")
        rules = policy.items("rules")
        # Without that rule a run lost to the machine counts as any failure does.
        self.values["requeue"] = rules == [DISRUPTION]
        if rules and rules != [DISRUPTION]:
            self.refuse(
                policy.at("rules"),
                "are not supported, other than to ignore DisruptionTarget",
                "leave them out, and name failures to retry with: gsub --retry-on LIST",
            )
        policy.finish()

    def _read_pod(self, pod: _Part) -> None:
        if (policy := pod.text("restartPolicy")) not in (None, "Never", "OnFailure"):
            self.refuse(pod.at("restartPolicy"), f"is {printable(policy, 40)}, which no Job has", "use Never")
        limit = pod.number("activeDeadlineSeconds", 1, MAX_SECONDS)
        if limit is not None:
            self.values["time_limit_s"] = limit
        grace = pod.number("terminationGracePeriodSeconds", 0, 86400)
        if grace is not None:
            self.values["grace_s"] = grace
        if qos := pod.text("priorityClassName"):
            self.values["qos"] = qos
        self._read_nodes(pod)

    def _read_nodes(self, pod: _Part) -> None:
        if name := pod.text("nodeName"):
            self.values["nodelist"] = (name,)
        selector = pod.part("nodeSelector")
        if name := selector.text(HOSTNAME):
            self.values["nodelist"] = (name,)
        for key in selector.rest():
            self.refuse(printable(selector.at(key), 200), _NOT_KEPT, WHAT_TO_DO[f"{_POD}.nodeSelector"])
        affinity = pod.raw("affinity")
        if affinity is None:
            return
        try:
            (term,) = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
            wanted = {one["operator"]: tuple(one["values"]) for one in term["matchExpressions"]}
            nodes = [{"key": HOSTNAME, "operator": word, "values": list(names)} for word, names in wanted.items()]
            required = {"nodeSelectorTerms": [{"matchExpressions": nodes}]}
            is_known = affinity == {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
            is_known = is_known and all(isinstance(name, str) for names in wanted.values() for name in names)
            if not is_known or not wanted.keys() <= {"In", "NotIn"}:
                raise ValueError
        except (TypeError, ValueError, KeyError):
            self.refuse(
                pod.at("affinity"), f"{_NOT_KEPT}, other than nodes by {HOSTNAME}", WHAT_TO_DO[pod.at("affinity")]
            )
            return
        for operator, key in (("In", "nodelist"), ("NotIn", "exclude")):
            if operator in wanted:
                self.values[key] = wanted[operator]

    # --- the container ------------------------------------------------------------------------------

    def _read_containers(self, pod: _Part, is_indexed: bool) -> Json:
        containers = pod.parts("containers")
        if len(containers) != 1:
            if not self.errors or containers:
                what = f"has {len(containers)} containers; gsub runs one command"
                self.refuse(pod.at("containers"), what, "submit a job for each, or start them in one command")
            return {}
        main = containers[0]
        image = main.text("image")
        if image is not None and image != NO_IMAGE and not self._ignore_image:
            self.values["image"] = image
        self._read_env(main, is_indexed)
        command, args = main.texts("command"), main.texts("args")
        if folder := main.text("workingDir"):
            if folder.startswith("/"):
                self.values["work_dir"] = folder
            else:
                self.refuse(main.at("workingDir"), "is not absolute", "begin it with /")
        self._read_resources(main.part("resources"))
        main.finish()
        if not command:
            self.refuse(
                main.at("command"),
                "is missing: the command of an image is not known here",
                "write it out: command: [python, train.py]",
            )
            return {}
        program = self._program(
            [self._expanded(word, main.at("command")) for word in command],
            [self._expanded(word, main.at("args")) for word in args],
            is_indexed,
        )
        if self._env:
            self.values["extra_env"] = self._env
        return program

    def _read_env(self, main: _Part, is_indexed: bool) -> None:
        for entry in main.parts("env"):
            name = entry.text("name") or ""
            if not name or "=" in name or "\0" in name:
                self.refuse(entry.at("name"), "is not the name of a variable", "use letters, digits and _")
            source = entry.raw("valueFrom")
            if source is None:
                self._env[name] = self._expanded(entry.text("value") or "", entry.at("value"))
            elif is_indexed and any(_is_index(source, path) for path in _INDEX_PATHS):
                self._of_index.append(name)
            else:
                self.refuse(entry.at("valueFrom"), _NOT_KEPT, "write its value, or give it with: gsub -E NAME=VALUE")
            entry.finish()

    def _expanded(self, text: str, path: str) -> str:
        """The text with `$(NAME)` replaced as Kubernetes does; variables without a value stay."""
        found, at = [], 0
        while (mark := text.find("$", at)) >= 0:
            found.append(text[at:mark])
            following = text[mark + 1 : mark + 2]
            end = text.find(")", mark) if following == "(" else -1
            if following == "$":
                found.append("$")
                at = mark + 2
            elif end > 0:
                name = text[mark + 2 : end]
                if name == _INDEX or name in self._of_index:
                    self.refuse(
                        path,
                        f"has $({name}), which {_NOT_KEPT}",
                        "read the variable in a shell: sh -c '... $" + name + "'",
                    )
                found.append(self._env.get(name, text[mark : end + 1]))
                at = end + 1
            else:
                found.append("$")
                at = mark + 1
        return "".join((*found, text[at:]))

    def _program(self, command: list[str], args: list[str], is_indexed: bool) -> Json:
        has_numbers = not is_indexed or set(TASK_VARIABLES) & set(self._of_index)
        others = [name for name in self._of_index if name not in TASK_VARIABLES]
        if has_numbers and not others:
            if command[:3] == ["/bin/sh", "-c", LAUNCHER] and len(command) == 4 and SCRIPT_VARIABLE in self._env:
                script = self._env.pop(SCRIPT_VARIABLE)
                return {"script": script, "script_name": command[3], "argv": args}
            if len(command) > 3 and command[-3] == "-c" and first_words(command[-2]) == command[:-3]:
                return {"script": command[-2], "script_name": command[-1], "argv": args}
            return {"argv": [*command, *args]}
        # A cluster sets the number of the task under another name than we do.
        names = dict.fromkeys((_INDEX, *others))
        exported = " ".join(f'{name}="$GPUSCHED_ARRAY_TASK_ID"' for name in names)
        for name in names:
            if not name.isidentifier() or not name.isascii():
                self.refuse(f"{_MAIN}.env", f"has {printable(name, 40)}, which no shell can set", "rename it")
        return {"argv": ["/bin/sh", "-c", f'export {exported}; exec "$@"', "sh", *command, *args]}

    def _read_resources(self, resources: _Part) -> None:
        limits, requests = resources.part("limits").rest(), resources.part("requests").rest()
        resources.finish()
        for name in dict.fromkeys((*limits, *requests)):
            path = resources.at(f"{'limits' if name in limits else 'requests'}.{printable(name, 100)}")
            wanted = limits.get(name, requests.get(name))
            if name in limits and name in requests and _quantity(limits[name]) != _quantity(requests[name]):
                self.notes.append(f"{path} is booked; its lower request has no effect")
            amount = _quantity(wanted)
            if amount is None or amount < 0:
                self.refuse(path, f"is {_shown(wanted)}, which is not an amount", 'write it as "4", 500m or 8Gi')
            elif name == "cpu":
                self.values["cpus"] = amount
            elif name == "memory":
                mib = -int(-amount // (1 << 20))
                if mib > MAX_MIB:
                    self.refuse(path, "is more memory than any node has", "write it as 8Gi")
                elif mib:
                    self.values["mem_mib"] = mib
            elif name == GPU or name.startswith(MIG):
                if amount != int(amount) or amount > (FIELDS["gpus"].high or 0):
                    self.refuse(path, "is not a number of GPUs", "write it as 1")
                elif amount:
                    self._take_gpus(path, int(amount), name.removeprefix(MIG) if name != GPU else None)
            elif name == "ephemeral-storage":
                self.notes.append(f"{path} has no effect: disk space is not booked")
            else:
                self.refuse(path, _NOT_KEPT, "ask for resources of [node] resources with: gsub --res NAME=N")

    def _take_gpus(self, path: str, count: int, kind: str | None) -> None:
        if "gpus" in self.values:
            self.refuse(path, "is a second kind of GPU, and a job has one", "submit a job for each")
        self.values["gpus"] = count
        if kind:
            self.values["gpu_type"] = kind


_EXAMPLE = "an example: gsub --print k8s -g 1 -- python train.py"


def _texts_of(part: _Part, found: _Mistakes) -> dict[str, str]:
    texts = {}
    for key, value in part.rest().items():
        if isinstance(value, str):
            texts[key] = value
        elif value is not None:
            found.refuse(printable(part.at(key), 200), f"must be a string, not {_kind_of(value)}", 'quote it: "1"')
    return texts


def _is_index(source: object, path: str) -> bool:
    """Whether a variable has the number of the task; a cluster adds the version of the API."""
    plain = {"fieldRef": {"fieldPath": path}}
    return source in (plain, {"fieldRef": {"fieldPath": path, "apiVersion": "v1"}})


_UNITS = {
    **{f"{letter}i": float(1 << 10 * power) for power, letter in enumerate("KMGTPE", 1)},
    **{letter: 10.0 ** (3 * power) for power, letter in enumerate("kMGTPE", 1)},
    "n": 1e-9,
    "u": 1e-6,
    "m": 1e-3,
}


def _quantity(value: object) -> float | None:
    """An amount in Kubernetes' syntax, `500m`, `8Gi`, `1e3`; None if it is none."""
    # A number of thousands of digits cannot even be written.
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or (type(value) is int and value >> 128):
        return None
    text = str(value)
    unit = next((unit for unit in (text[-2:], text[-1:]) if unit in _UNITS), "")
    digits = text.removesuffix(unit) if unit else text
    if len(digits) > 40 or not digits or not set(digits) <= set("0123456789.eE+-"):
        return None
    try:
        amount = float(digits) * _UNITS.get(unit, 1.0)
    except ValueError:
        return None
    return amount if abs(amount) < 1e30 else None
