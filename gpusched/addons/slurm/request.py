"""Options of sbatch, srun and salloc as a submission of ours: the `spec` that gsub sends.

A `JobRequest` takes in layers of options, the weakest first: the directives of a script, variables such as
SBATCH_PARTITION, the command line. Within a layer Slurm's exclusions hold; between layers the later one wins.
"""

from __future__ import annotations

import os

from gpusched.addons.slurm.command import CommandError
from gpusched.cli.slurm_options import (
    NO_MAIL,
    ONLY_SLURM,
    PER_SOCKET,
    SOCKETS,
    SOCKETS_PER_NODE,
    count_of_sockets,
    gpus_of_sockets,
    rows,
)
from gpusched.errors import Refused
from gpusched.model.units import MAX_MIB, is_digits, printable
from gpusched.paths import MAX_TEXT, read_at_most

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    from gpusched.addons.slurm.command import Command

BAD_VALUE = 255
"""Exit code for a malformed value of an option."""
NICE = 100
"""What a bare --nice adds."""
MOST_NICE = 10_000

JOB_ROWS = """
-A --account NAME  account to charge
-b --begin TIME  earliest start: now+1hour, 18:00, 2026-12-24T18:00
-M --clusters --cluster NAMES  this cluster's name, or all
--comment TEXT  a comment to store with the job
-C --constraint LABELS  only nodes with these labels: 'nvlink&!old|h100'
--cpus-per-gpu N  cores per GPU, instead of -c
-c --cpus-per-task N  cores per task
--deadline TIME  time by which the job must have ended
-d --dependency LIST  afterok:41,afterany:42:43, afternotok, after:41+10, aftercorr, singleton; , for all, ? for any
-x --exclude NODES  do not use these nodes
--exclusive [WORD]  run no other job on the same nodes
-G --gpus LIST  total number of GPUs: 2, or a100:2
--gpus-per-node LIST  GPUs per node: 2, or a100:2
--gpus-per-task LIST  GPUs per task: 1, or a100:1
--gpus-per-socket LIST  GPUs per socket, with --sockets-per-node
--gres LIST  resources per node: gpu:2, gpu:a100:1,scratch:10; mps:50 is half a GPU, shard:1 a shard of one
-H --hold  submit the job on hold; scontrol release releases it
-J --job-name NAME  name of the job (default: that of the script or command)
--kill-on-invalid-dep WORD  yes: cancel the job once its dependency can never be satisfied
-L --licenses LIST  licenses: matlab:2,ansys
--mail-type LIST  BEGIN, END, FAIL, REQUEUE, TIME_LIMIT_80, ARRAY_TASKS, ALL or NONE; sent like your alerts
--mail-user ADDRESS  an email address, or one of your alert targets
--mem SIZE  memory per node: 8G, or 8192 for MiB; 0 is all of it
--mem-per-cpu SIZE  memory per core
--mem-per-gpu SIZE  memory per GPU
--mincpus N  at least N cores on each node
--nice [N]  lower the priority by N (default 100, at most 10000)
-F --nodefile FILE  only the nodes listed in this file
-w --nodelist NODES  these nodes, lab1,gpu[01-03], or with -N so many of them; with a slash, a file that lists them
-N --nodes N  number of nodes, or a range: 1-2
-n --ntasks N  number of tasks for srun to start
--ntasks-per-gpu N  tasks per GPU
--ntasks-per-node --tasks-per-node N  tasks per node
-p --partition NAME  partition, a queue here; only the first of several is used
--prefer LABELS  prefer nodes with these labels
--priority N  0 holds the job; other values have no effect
-q --qos NAME  quality of service
--reservation NAME  run inside this reservation
-B --extra-node-info --sockets-per-node N  number of sockets; it only multiplies --gpus-per-socket
--signal SIGNAL  USR1@90: signal the steps 90 seconds before the time limit; B:USR1@90: the batch shell
-t --time TIME  time limit: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S; 0 for no limit
--tres-per-task LIST  cores and GPUs per task: cpu:2,gres/gpu:1
--wckey NAME  workload key to store with the job
"""
"""Options of the job, as rows of a `Command`; a metavar in brackets is an optional value there."""
_COMMON_VARIABLES = {
    "ACCOUNT": "account",
    "ACCTG_FREQ": "acctg-freq",
    "CLUSTERS": "clusters",
    "CONSTRAINT": "constraint",
    "CONTAINER": "container",
    "CORE_SPEC": "core-spec",
    "CPUS_PER_GPU": "cpus-per-gpu",
    "DEBUG": "verbose",
    "DELAY_BOOT": "delay-boot",
    "DISTRIBUTION": "distribution",
    "EXCLUSIVE": "exclusive",
    "GPU_BIND": "gpu-bind",
    "GPU_FREQ": "gpu-freq",
    "GPUS": "gpus",
    "GPUS_PER_NODE": "gpus-per-node",
    "GPUS_PER_TASK": "gpus-per-task",
    "GRES": "gres",
    "GRES_FLAGS": "gres-flags",
    "HINT": "hint",
    "MEM_BIND": "mem-bind",
    "MEM_PER_CPU": "mem-per-cpu",
    "MEM_PER_GPU": "mem-per-gpu",
    "MEM_PER_NODE": "mem",
    "NETWORK": "network",
    "NO_KILL": "no-kill",
    "OVERCOMMIT": "overcommit",
    "PARTITION": "partition",
    "POWER": "power",
    "PROFILE": "profile",
    "QOS": "qos",
    "REQ_SWITCH": "switches",
    "RESERVATION": "reservation",
    "SIGNAL": "signal",
    "SPREAD_JOB": "spread-job",
    "THREAD_SPEC": "thread-spec",
    "THREADS_PER_CORE": "threads-per-core",
    "TIMELIMIT": "time",
    "USE_MIN_NODES": "use-min-nodes",
    "WAIT_ALL_NODES": "wait-all-nodes",
    "WCKEY": "wckey",
}
"""Variables of all three commands after their prefix, and the option that each sets."""
_SHARED_VARIABLES = ("SLURM_CLUSTERS", "SLURM_HINT")
"""Variables that every command reads, whatever its prefix."""


def from_variables(command: Command, prefix: str, own: Mapping[str, str]) -> list[tuple[str, str | None]]:
    """The layer of options from variables such as SBATCH_PARTITION. Raises: CommandError that names the variable.

    Args: own: further variables of the command, without the prefix.
    """
    found: list[tuple[str, str | None]] = []
    # The command's own variables after those that all commands share, as the last option wins.
    for variable, text in sorted(os.environ.items(), key=lambda one: one[0] not in _SHARED_VARIABLES):
        if variable in _SHARED_VARIABLES:
            name = variable.removeprefix("SLURM_")
        elif variable.startswith(prefix):
            name = variable[len(prefix) :]
        else:
            continue
        long = own.get(name) or _COMMON_VARIABLES.get(name)
        if long is None:
            continue
        option = command.by_name[f"--{long}"]
        is_bare = not option.needs_value and (not option.metavar or text in ("", "1", "yes"))
        one = (long, None if is_bare else text)
        check_value(command, one, f"the variable {variable}={printable(text)}")
        found.append(one)
    return found


def check_value(command: Command, option: tuple[str, str | None], where: str) -> None:
    """Read an option by itself, so that an error can say where it is written. Raises: CommandError."""
    if option[0] in _READERS or option[0] in _NUMBERS or option[0] in ONLY_SLURM:
        try:
            JobRequest(command).take([option])
        except CommandError as error:
            raise CommandError(f"{error.text}\n{command.name}: {where}", error.code) from None


_TEXTS = {
    "account": "account",
    "comment": "comment",
    "constraint": "constraint",
    "dependency": "dependency",
    "error": "stderr",
    "input": "stdin",
    "job-name": "name",
    "output": "stdout",
    "prefer": "prefer",
    "qos": "qos",
    "reservation": "reservation",
    "wckey": "wckey",
}
"""Options kept as they are, and the field of each."""
_NUMBERS = {
    "mincpus": "min_cpus",
    "ntasks": "ntasks",
    "ntasks-per-node": "ntasks_per_node",
    "ntasks-per-gpu": "ntasks_per_gpu",
}
_MOST = 65536
_MOST_NODES = 4096
_FLAGS: Mapping[str, tuple[str, object]] = {
    "hold": ("hold", True),
    "requeue": ("requeue", True),
    "no-requeue": ("requeue", False),
}
_BAD_GRES = "Invalid generic resource (gres) specification"
_GPUS = ("gpus", "gpus_per_node", "gpus_per_task", "gpu_type", "gpu_fraction", "gpu_shards", PER_SOCKET)
"""Together one wish for GPUs: a later layer that names any of them replaces them all."""
_MEMORY = ("mem_mib", "mem_per_cpu_mib", "mem_per_gpu_mib")
_CORES = ("cpus", "cpus_per_gpu")
_MAIL_WORDS = frozenset(
    "NONE BEGIN END FAIL REQUEUE ALL INVALID_DEPEND STAGE_OUT TIME_LIMIT TIME_LIMIT_90 TIME_LIMIT_80 TIME_LIMIT_50 "
    "ARRAY_TASKS".split()
)
_EVENTS = {
    "ALL": "begin,end,fail,requeue",
    "TIME_LIMIT": "fail",
    "TIME_LIMIT_90": "time_limit_80",
    "TIME_LIMIT_50": "time_limit_80",
    "INVALID_DEPEND": "fail",
}
"""Events of Slurm by the words here: a run that reaches its time limit fails, and one warning precedes it."""
_SIZES = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1 << 20, "P": 1 << 30}


class JobRequest:
    """What the options of one submission ask for.

    Args: own: options of the command itself, which end up in `own`.
    """

    def __init__(self, command: Command, own: Iterable[str] = ()) -> None:
        self.command = command
        self.values: dict[str, Any] = {}
        """Fields of a spec, see `model.spec`."""
        self.own: dict[str, str | None] = {}
        """Options of the command itself, with their texts."""
        self.notes: list[str] = []
        self.ignored: list[str] = []
        """Sentences on options without effect."""
        self._own_names = frozenset(own)
        self._layer: set[str] = set()
        self._now: float | None = None

    def take(self, options: Iterable[tuple[str, str | None]]) -> None:
        """Take in one layer of options: long names and texts. Raises: CommandError."""
        self._layer = set()
        for name, text in options:
            self._take_one(name, text)

    def _take_one(self, name: str, text: str | None) -> None:
        if name in self._own_names:
            self.own[name] = text
        elif name in _FLAGS:
            key, value = _FLAGS[name]
            self.values[key] = value
        elif name in _TEXTS:
            self.values[_TEXTS[name]] = self._clean(name, text or "")
        elif name in _NUMBERS:
            self.values[_NUMBERS[name]] = self._number(name, text or "")
        elif name in _READERS:
            _READERS[name](self, name, text)
        elif (known := ONLY_SLURM.get(name)) is not None and not known.is_refused:
            self.ignore(known.sentence)
        else:
            why = f" is not supported: {known.why}" if known is not None else " is not supported"
            raise self.command.error(f"--{name}{why}", BAD_VALUE)

    def say(self, text: str) -> None:
        """Keep a note for stderr; each is said once."""
        if text not in self.notes:
            self.notes.append(text)

    def ignore(self, sentence: str) -> None:
        """Keep a sentence on an option without effect; each is said once."""
        if sentence not in self.ignored:
            self.ignored.append(sentence)

    def invalid(self, name: str) -> CommandError:
        """The error for a malformed value."""
        return self.command.error(f"Invalid --{name} specification", BAD_VALUE)

    def now(self) -> float:
        """The same instant for all options."""
        if self._now is None:
            import time  # few options need it

            self._now = time.time()
        return self._now

    def _clean(self, name: str, text: str) -> str:
        if "\0" in text:
            raise self.invalid(name)
        return text

    def _number(self, name: str, text: str) -> int:
        if not is_digits(text) or not int(text[:9]) > 0 or len(text) > 9:
            raise self.command.error(f'Invalid numeric value "{printable(text)}" for --{name}.')
        return min(int(text), _MOST)

    def _only_one_of(self, keys: tuple[str, ...], key: str, value: object, options: str) -> None:
        """Set one of several fields that exclude each other; those of weaker layers give way."""
        if any(other in self._layer for other in keys if other != key):
            raise self.command.error(f"{options} are mutually exclusive.")
        for other in keys:
            self.values.pop(other, None)
        self.values[key] = value
        self._layer.add(key)

    def set_gpus(
        self, key: str, count: int, kind: str | None, fraction: float | None = None, shards: int | None = None
    ) -> None:
        """Set the GPUs of a node, a task or the job; those of weaker layers give way. Raises: CommandError."""
        if kind and "|" in kind:
            # Of -g alone, which is no option of Slurm's.
            raise self.command.error(_BAD_GRES)
        if self._layer.isdisjoint(_GPUS):
            for other in _GPUS:
                self.values.pop(other, None)
        self._layer.update((key, "gpu_type"))
        known = self.values.get("gpu_type")
        if kind and known not in (None, kind):
            raise self.command.error(
                f"GPUs of two types, {printable(str(known))} and {printable(kind)}, are not supported in one job; "
                "submit one job for each",
                BAD_VALUE,
            )
        self.values[key] = count
        if kind:
            self.values["gpu_type"] = kind
        if fraction is not None:
            self.values["gpu_fraction"] = fraction
        if shards is not None:
            self.values["gpu_shards"] = shards

    def spec(self) -> dict[str, Any]:
        """The fields of a spec that say nothing about the program and its environment."""
        # Programs write an empty text for none.
        found = {key: value for key, value in self.values.items() if value not in (None, "")}
        if "notify_to" in found and "notify" not in found:
            # As in Slurm, an address alone asks for nothing.
            del found["notify_to"]
            if "notify" not in self.values:
                self.ignore(NO_MAIL)
        per_socket, sockets = found.pop(PER_SOCKET, None), found.pop(SOCKETS_PER_NODE, None)
        try:
            each = gpus_of_sockets(per_socket, sockets)
        except ValueError as error:
            raise self.command.error(f"--gpus-per-socket: {error}") from None
        if each is not None:
            found["gpus_per_node"] = each
        elif sockets is not None:
            self.ignore(f"--sockets-per-node has no effect: {SOCKETS}")
        self._count_nodes(found)
        found.setdefault("never_satisfied", "wait")
        found["if_infeasible"] = "wait"
        return found

    def _count_nodes(self, found: dict[str, Any]) -> None:
        """Number of nodes as in Slurm: by default all that are named, and never more than tasks."""
        tasks, nodes = found.get("ntasks"), found.get("nodes")
        if tasks is not None and nodes is not None and tasks < nodes:
            self.say(f"Warning: can't run {tasks} processes on {nodes} nodes, setting nnodes to {tasks}")
            found["nodes"] = tasks
            found.pop("nodes_max", None)
        if nodes is None and "nodelist" in found:
            from gpusched.model.hostlist import expand  # few jobs name nodes

            try:
                named = len(expand(found["nodelist"][0]))
            except ValueError:
                # The daemon says what is wrong with it.
                return
            if 1 < named <= (tasks or named):
                found["nodes"] = named


def only_slurm_rows(without: Iterable[str] = ()) -> str:
    """Rows of the options that only Slurm has, less those of `JOB_ROWS` and these."""
    return rows(without={"nodefile", "priority", *without})


# --- options with a syntax of their own -----------------------------------------------------------------


def _read_time(request: JobRequest, name: str, text: str | None) -> None:
    from gpusched.addons.slurm.times import parse_limit_s  # imports the clock; many jobs state no limit

    try:
        limit_s = parse_limit_s(text or "")
    except ValueError:
        raise request.invalid(name) from None
    request.values["time_limit_s"] = "unlimited" if limit_s is None else limit_s


def _read_instant(request: JobRequest, name: str, text: str | None) -> None:
    from gpusched.addons.slurm.times import parse_instant  # few jobs have one

    try:
        at = parse_instant(text or "", request.now())
    except (ValueError, OverflowError):
        error = request.invalid(name)
        error.text = f"Invalid time specification (pos=0): {printable(text or '')}\n{error.text}"
        raise error from None
    request.values["begin_at" if name == "begin" else "deadline_at"] = at


def _mebibytes(request: JobRequest, name: str, text: str) -> int:
    word = text.upper()
    for ending in ("IB", "B"):
        if word.endswith(ending) and word[: -len(ending)][-1:] in _SIZES:
            word = word.removesuffix(ending)
            break
    unit = word[-1:] if word[-1:] in _SIZES else "M"
    digits = word.removesuffix(unit) if word.endswith(unit) else word
    if not is_digits(digits) or len(digits) > 15:
        raise request.invalid(name)
    return min(MAX_MIB, -int(-int(digits) * _SIZES[unit] // 1))


def _read_memory(request: JobRequest, name: str, text: str | None) -> None:
    amount: int | str = _mebibytes(request, name, text or "")
    if not amount:
        # All memory of the node, also if it is said of a core or a GPU.
        name, amount = "mem", "all"
    key = {"mem": "mem_mib", "mem-per-cpu": "mem_per_cpu_mib", "mem-per-gpu": "mem_per_gpu_mib"}[name]
    request._only_one_of(_MEMORY, key, amount, "--mem, --mem-per-cpu, and --mem-per-gpu")


def _read_cores(request: JobRequest, name: str, text: str | None) -> None:
    key = "cpus" if name == "cpus-per-task" else "cpus_per_gpu"
    value = request._number(name, text or "")
    request._only_one_of(_CORES, key, value, "--cpus-per-task and --cpus-per-gpu")


def _read_nodes(request: JobRequest, name: str, text: str | None) -> None:
    low, dash, high = (text or "").partition("-")
    ends = (low, high) if dash else (low,)
    if not all(is_digits(end) and 0 < len(end) < 7 for end in ends) or int(ends[-1]) < max(1, int(low)):
        shown = printable(text or "")
        raise request.command.error(f'"{shown}" is not a valid node count\nInvalid --{name} specification', BAD_VALUE)
    most = int(ends[-1])
    request.values["nodes"] = min(max(1, int(low)), 4096)
    request.values["nodes_max"] = min(most, 4096) if most > max(1, int(low)) else None


def _read_gpus(request: JobRequest, name: str, text: str | None) -> None:
    kind, _, count = (text or "").rpartition(":")
    if not (is_digits(count) and len(count) < 6) or ":" in kind or "," in (text or ""):
        if "," in (text or ""):
            raise request.command.error(
                f"--{name}={printable(text or '')}: GPUs of several types are not supported in one job; submit one "
                "job for each",
                BAD_VALUE,
            )
        raise request.invalid(name)
    request.set_gpus(name.replace("-", "_"), int(count), kind or None)


def _read_gres(request: JobRequest, name: str, text: str | None) -> None:
    bad = request.command.error(_BAD_GRES)
    others: dict[str, int] = {}
    for word in filter(None, (text or "").split(",")):
        parts = word.removeprefix("gres:").removeprefix("gres/").split(":")
        last = parts[-1]
        has_count = len(parts) > 1 and is_digits(last) and len(last) < 9
        count = int(last) if has_count else 1
        kinds = parts[1 : len(parts) - has_count]
        if not all(parts) or len(kinds) > 1 or (kinds and parts[0] != "gpu"):
            raise bad
        if parts[0] == "gpu":
            request.set_gpus("gpus_per_node", count, kinds[0] if kinds else None)
        elif parts[0] == "mps" and 0 < count <= 100:
            # Percent of one GPU.
            request.set_gpus("gpus", 1, None, None if count == 100 else count / 100)
        elif parts[0] == "shard" and count:
            # Of one GPU; the scheduler knows how many it has.
            request.set_gpus("gpus_per_node", 1, None, shards=count)
        elif parts[0] != "none":
            others[parts[0]] = count
    if others:
        request.values["resources"] = others


def _read_gpus_per_socket(request: JobRequest, name: str, text: str | None) -> None:
    kind, _, count = (text or "").rpartition(":")
    if not (is_digits(count) and 0 < len(count) < 6) or ":" in kind:
        raise request.invalid(name)
    request.set_gpus(PER_SOCKET, int(count), kind or None)


def _read_sockets(request: JobRequest, name: str, text: str | None) -> None:
    try:
        request.values[SOCKETS_PER_NODE] = count_of_sockets(text or "")
    except ValueError:
        raise request.invalid(name) from None


def _read_tres_per_task(request: JobRequest, name: str, text: str | None) -> None:
    from gpusched.model.option import tres_per_task  # few jobs have it

    if "|" in (text or ""):
        raise request.command.error(_BAD_GRES)
    try:
        found = tres_per_task(text or "")
    except ValueError as error:
        raise request.command.error(f"--{name}: {error}", BAD_VALUE) from None
    if "cpus" in found:
        request._only_one_of(_CORES, "cpus", int(found["cpus"]), "--tres-per-task=cpu and --cpus-per-gpu")
    if "gpus_per_task" in found:
        request.set_gpus("gpus_per_task", found["gpus_per_task"], found.get("gpu_type"))


def _read_nodelist(request: JobRequest, name: str, text: str | None) -> None:
    names = text or ""
    if name == "nodefile" or "/" in names:
        try:
            with open(names, "rb") as file:
                content = read_at_most(file, MAX_TEXT, printable(names), "")
        except (OSError, ValueError):
            raise request.command.error(f"Unable to open file {printable(text or '')}", 1) from None
        except Refused as error:
            raise request.command.error(error.message, 1) from None
        names = ",".join(content.decode("utf-8", "replace").replace(",", " ").split())
    if not names:
        raise request.invalid(name)
    request.values["exclude" if name == "exclude" else "nodelist"] = [names]


def _read_exclusive(request: JobRequest, name: str, text: str | None) -> None:
    if (text or "user").lower() not in ("user", "mcs"):
        raise request.invalid(name)
    request.values["exclusive"] = True


def _read_mail_type(request: JobRequest, name: str, text: str | None) -> None:
    given = [word for word in (text or "").upper().split(",") if word]
    if not given or not _MAIL_WORDS.issuperset(given):
        raise request.invalid(name)
    words = ",".join(_EVENTS.get(word, word.lower()) for word in given)
    events = [word for word in words.split(",") if word not in ("none", "stage_out")]
    if "array_tasks" in events and len(events) == 1:
        events = []
    request.values["notify"] = list(dict.fromkeys(events)) or None


def _read_mail_user(request: JobRequest, name: str, text: str | None) -> None:
    own = os.environ.get("USER")
    request.values["notify_to"] = [word for word in (text or "").split(",") if word and word != own] or None


def _read_nice(request: JobRequest, name: str, text: str | None) -> None:
    digits = (text or str(NICE)).removeprefix("-").removeprefix("+")
    if not (is_digits(digits) and len(digits) < 11):
        raise request.invalid(name)
    nice = -int(digits) if text and text.startswith("-") else int(digits)
    request.values["nice"] = max(-MOST_NICE, min(MOST_NICE, nice))


def _read_priority(request: JobRequest, name: str, text: str | None) -> None:
    word = text or ""
    if word.upper() != "TOP" and not is_digits(word):
        raise request.invalid(name)
    if word.strip("0"):
        request.ignore(ONLY_SLURM[name].sentence)
    else:
        request.values["hold"] = True


def _read_array(request: JobRequest, name: str, text: str | None) -> None:
    tasks, percent, most = request._clean(name, text or "").partition("%")
    if tasks.startswith("[") and tasks.endswith("]"):
        # As squeue prints it, and MATLAB submits it.
        tasks = tasks[1:-1]
    request.values["array"] = f"{tasks}{percent}{most}"


_METHODS = frozenset({"*", "block", "cyclic", "fcyclic"})


def _read_distribution(request: JobRequest, name: str, text: str | None) -> None:
    """Check a value that has no effect: `-mem=4G` is one of these to the parser, and its writer wants memory."""
    first, *sockets = (text or "").lower().removesuffix(",pack").removesuffix(",nopack").split(":")
    method, _, size = first.partition("=")
    is_known = method == "plane" or (not size and (method in _METHODS or method == "arbitrary"))
    if not is_known or len(sockets) > 2 or not _METHODS.issuperset(sockets):
        raise request.invalid(name)
    request.ignore(ONLY_SLURM[name].sentence)


def _read_signal(request: JobRequest, name: str, text: str | None) -> None:
    from gpusched.model.option import notice  # needs the names of the signals

    marks, colon, rest = (text or "").rpartition(":")
    if colon and marks.upper() not in ("B", "R", "BR", "RB"):
        raise request.invalid(name)
    try:
        request.values.update(notice(f"B:{rest}" if "B" in marks.upper() else rest))
    except ValueError:
        raise request.invalid(name) from None


def _read_partition(request: JobRequest, name: str, text: str | None) -> None:
    first, comma, _ = (text or "").partition(",")
    if not first:
        raise request.command.error(
            "invalid partition specified: (null)\nBatch job submission failed: Invalid partition name specified"
        )
    if comma:
        request.say(f"only the first of several partitions is used: {printable(first)}")
    request.values["queue"] = first


def _read_licenses(request: JobRequest, name: str, text: str | None) -> None:
    from gpusched.model.option import counts  # few jobs ask for any

    try:
        request.values["licenses"] = counts("matlab:2")(text or "")
    except ValueError:
        raise request.command.error("Batch job submission failed: Invalid license specification") from None


def _read_invalid_dep(request: JobRequest, name: str, text: str | None) -> None:
    word = (text or "").lower()
    if word not in ("yes", "no"):
        raise request.invalid(name)
    request.values["never_satisfied"] = "cancel" if word == "yes" else "wait"


def _read_open_mode(request: JobRequest, name: str, text: str | None) -> None:
    word = (text or "").lower()
    if not word or not ("append".startswith(word) or "truncate".startswith(word)):
        raise request.invalid(name)
    request.values["open_mode"] = "append" if word[0] == "a" else "truncate"


def _read_folder(request: JobRequest, name: str, text: str | None) -> None:
    if not text:
        raise request.invalid(name)
    request.values["work_dir"] = os.path.abspath(request._clean(name, text))


def _refuse_user(request: JobRequest, name: str, text: str | None) -> None:
    if os.getuid():
        raise request.command.error(f"--{name} only permitted by root user", BAD_VALUE)
    raise request.command.error(f"--{name} is not supported: {ONLY_SLURM[name].why}", BAD_VALUE)


_READERS: Mapping[str, Callable[[JobRequest, str, str | None], None]] = {
    "array": _read_array,
    "begin": _read_instant,
    "chdir": _read_folder,
    "cpus-per-gpu": _read_cores,
    "cpus-per-task": _read_cores,
    "deadline": _read_instant,
    "distribution": _read_distribution,
    "exclude": _read_nodelist,
    "extra-node-info": _read_sockets,
    "exclusive": _read_exclusive,
    "gid": _refuse_user,
    "gpus": _read_gpus,
    "gpus-per-node": _read_gpus,
    "gpus-per-socket": _read_gpus_per_socket,
    "gpus-per-task": _read_gpus,
    "gres": _read_gres,
    "kill-on-invalid-dep": _read_invalid_dep,
    "licenses": _read_licenses,
    "mail-type": _read_mail_type,
    "mail-user": _read_mail_user,
    "mem": _read_memory,
    "mem-per-cpu": _read_memory,
    "mem-per-gpu": _read_memory,
    "nice": _read_nice,
    "nodefile": _read_nodelist,
    "nodelist": _read_nodelist,
    "nodes": _read_nodes,
    "open-mode": _read_open_mode,
    "partition": _read_partition,
    "priority": _read_priority,
    "signal": _read_signal,
    "time": _read_time,
    "tres-per-task": _read_tres_per_task,
    "uid": _refuse_user,
}
