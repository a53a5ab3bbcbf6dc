"""Options of sbatch, srun and salloc as a submission of ours: the `spec` that gsub sends.

A `JobRequest` takes in layers of options, the weakest first: the directives of a script, variables such as
SBATCH_PARTITION, the command line. Within a layer Slurm's exclusions hold; between layers the later one wins.
"""

from __future__ import annotations

import os

from gpusched.addons.slurm.command import CommandError
from gpusched.addons.slurm.spellings import (
    BAD_GRES,
    CORES,
    COUNTS,
    FILES,
    GPUS,
    INSTANTS,
    SIZES,
    TEXTS,
    options_of,
    typed_count,
)
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
from gpusched.model.option import (
    OptionNote,
    counts,
    gres,
    kill_on_invalid_dep,
    mail_type,
    nodes,
    notice,
    tres_per_task,
    without_effect,
)
from gpusched.model.units import is_digits, parse_size_mib, printable
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
    **options_of(
        "ACCOUNT ACCTG_FREQ CLUSTERS CONSTRAINT CONTAINER CORE_SPEC CPUS_PER_GPU DELAY_BOOT DISTRIBUTION EXCLUSIVE "
        "GPU_BIND GPU_FREQ GPUS GPUS_PER_NODE GPUS_PER_TASK GRES GRES_FLAGS HINT MEM_BIND MEM_PER_CPU MEM_PER_GPU "
        "NETWORK NO_KILL OVERCOMMIT PARTITION POWER PROFILE QOS RESERVATION SIGNAL SPREAD_JOB THREAD_SPEC "
        "THREADS_PER_CORE USE_MIN_NODES WAIT_ALL_NODES WCKEY"
    ),
    "DEBUG": "verbose",
    "MEM_PER_NODE": "mem",
    "REQ_SWITCH": "switches",
    "TIMELIMIT": "time",
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
    if option[0] in _READERS or option[0] in COUNTS or option[0] in ONLY_SLURM:
        try:
            JobRequest(command).take([option])
        except CommandError as error:
            raise CommandError(f"{error.text}\n{command.name}: {where}", error.code) from None


_KEPT = {**TEXTS, **FILES, "job-name": "name"}
"""Options whose texts are kept as they are, and the field of each."""
_MOST = 65536
_FLAGS: Mapping[str, tuple[str, object]] = {
    "hold": ("hold", True),
    "requeue": ("requeue", True),
    "no-requeue": ("requeue", False),
}
_GPUS = ("gpus", "gpus_per_node", "gpus_per_task", "gpu_type", "gpu_fraction", "gpu_shards", PER_SOCKET)
"""Together one wish for GPUs: a later layer that names any of them replaces them all."""
_MEMORY = tuple(SIZES.values())
_CORES = tuple(CORES.values())


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
        self.ignored: list[OptionNote] = []
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
        elif name in _KEPT:
            self.values[_KEPT[name]] = self.clean(name, text or "")
        elif name in COUNTS:
            self.values[COUNTS[name]] = self.count(name, text or "")
        elif name in _READERS:
            _READERS[name](self, name, text)
        elif (known := ONLY_SLURM.get(name)) is not None and not known.is_refused:
            self.ignore(known.note)
        else:
            why = f" is not supported: {known.why}" if known is not None else " is not supported"
            raise self.command.error(f"--{name}{why}", BAD_VALUE)

    def say(self, text: str) -> None:
        """Keep a note for stderr; each is printed once."""
        if text not in self.notes:
            self.notes.append(text)

    def ignore(self, note: OptionNote) -> None:
        """Keep a note on an option without effect; each is printed once."""
        if note not in self.ignored:
            self.ignored.append(note)

    def invalid(self, name: str) -> CommandError:
        """The error for a malformed value."""
        return self.command.error(f"Invalid --{name} specification", BAD_VALUE)

    def now(self) -> float:
        """The same instant for all options."""
        if self._now is None:
            import time  # few options need it

            self._now = time.time()
        return self._now

    def clean(self, name: str, text: str) -> str:
        """A text as it was given. Raises: CommandError for one that no program could be told."""
        if "\0" in text:
            raise self.invalid(name)
        return text

    def count(self, name: str, text: str) -> int:
        """A number above 0. Raises: CommandError."""
        if not is_digits(text) or not int(text[:9]) > 0 or len(text) > 9:
            raise self.command.error(f'Invalid numeric value "{printable(text)}" for --{name}.')
        return min(int(text), _MOST)

    def read(self, name: str, reader: Callable[[str], Any], text: str | None) -> Any:
        """What a reader of ours makes of a text. Raises: CommandError in Slurm's words."""
        try:
            return reader(text or "")
        except ValueError:
            raise self.invalid(name) from None

    def set_one_of(self, keys: tuple[str, ...], key: str, value: object, options: str) -> None:
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
            raise self.command.error(BAD_GRES)
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
            self.ignore(without_effect("--sockets-per-node", SOCKETS))
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
    from gpusched.addons.slurm.values import parse_limit_s  # imports the clock; many jobs state no limit

    limit_s = request.read(name, parse_limit_s, text)
    request.values["time_limit_s"] = "unlimited" if limit_s is None else limit_s


def _read_instant(request: JobRequest, name: str, text: str | None) -> None:
    from gpusched.instants import parse_instant  # few jobs have one

    try:
        at = parse_instant(text or "", request.now())
    except (ValueError, OverflowError):
        error = request.invalid(name)
        error.text = f"Invalid time specification (pos=0): {printable(text or '')}\n{error.text}"
        raise error from None
    request.values[INSTANTS[name]] = at


def _read_memory(request: JobRequest, name: str, text: str | None) -> None:
    amount: int | str = "all"
    if (text or "").upper().rstrip("KMGTPIB") == "0":
        # All memory of the node, also if it is given for a core or a GPU.
        name = "mem"
    else:
        amount = request.read(name, parse_size_mib, text)
    request.set_one_of(_MEMORY, SIZES[name], amount, "--mem, --mem-per-cpu, and --mem-per-gpu")


def _read_cores(request: JobRequest, name: str, text: str | None) -> None:
    value = request.count(name, text or "")
    request.set_one_of(_CORES, CORES[name], value, "--cpus-per-task and --cpus-per-gpu")


def _read_nodes(request: JobRequest, name: str, text: str | None) -> None:
    try:
        request.values.update(nodes(text or ""))
    except ValueError:
        shown = printable(text or "")
        raise request.command.error(
            f'"{shown}" is not a valid node count\nInvalid --{name} specification', BAD_VALUE
        ) from None


def _read_gpus(request: JobRequest, name: str, text: str | None) -> None:
    if "," in (text or ""):
        raise request.command.error(
            f"--{name}={printable(text or '')}: GPUs of several types are not supported in one job; submit one job "
            "for each",
            BAD_VALUE,
        )
    kind, count = request.read(name, typed_count, text)
    request.set_gpus(PER_SOCKET if name == "gpus-per-socket" else GPUS[name], count, kind)


def _read_gres(request: JobRequest, name: str, text: str | None) -> None:
    others: dict[str, int] = {}
    for word in filter(None, (text or "").split(",")):
        try:
            found = gres(word)
        except ValueError:
            raise request.command.error(BAD_GRES) from None
        others.update(found.pop("resources", {}))
        if found:
            kind, fraction, shards = (found.get(key) for key in ("gpu_type", "gpu_fraction", "gpu_shards"))
            request.set_gpus("gpus_per_node", found["gpus_per_node"], kind, fraction, shards)
    if others:
        request.values["resources"] = others


def _read_sockets(request: JobRequest, name: str, text: str | None) -> None:
    request.values[SOCKETS_PER_NODE] = request.read(name, count_of_sockets, text)


def _read_tres_per_task(request: JobRequest, name: str, text: str | None) -> None:
    if "|" in (text or ""):
        raise request.command.error(BAD_GRES)
    try:
        found = tres_per_task(text or "")
    except ValueError as error:
        raise request.command.error(f"--{name}: {error}", BAD_VALUE) from None
    if "cpus" in found:
        request.set_one_of(_CORES, "cpus", int(found["cpus"]), "--tres-per-task=cpu and --cpus-per-gpu")
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


_MAIL_EVENTS = {
    "TIME_LIMIT": "fail",
    "TIME_LIMIT_90": "time_limit_80",
    "TIME_LIMIT_50": "time_limit_80",
    "INVALID_DEPEND": "fail",
    "STAGE_OUT": "none",
}
"""Events that gsub refuses, by the nearest word here: there is one warning before a time limit, and no burst buffer."""


def _read_mail_type(request: JobRequest, name: str, text: str | None) -> None:
    if not (text or "").strip(","):
        raise request.invalid(name)
    words = ",".join(_MAIL_EVENTS.get(word.strip().upper(), word) for word in (text or "").split(","))
    found = request.read(name, mail_type, words)
    # ARRAY_TASKS alone names no event.
    request.values["notify"] = found if found not in ([], ["array_tasks"]) else None


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
        request.ignore(ONLY_SLURM[name].note)
    else:
        request.values["hold"] = True


def _read_array(request: JobRequest, name: str, text: str | None) -> None:
    tasks, percent, most = request.clean(name, text or "").partition("%")
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
    request.ignore(ONLY_SLURM[name].note)


def _read_signal(request: JobRequest, name: str, text: str | None) -> None:
    marks, colon, rest = (text or "").rpartition(":")
    if colon and marks.upper() not in ("B", "R", "BR", "RB"):
        raise request.invalid(name)
    request.values.update(request.read(name, notice, f"B:{rest}" if "B" in marks.upper() else rest))


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
    try:
        request.values["licenses"] = counts("matlab:2")(text or "")
    except ValueError:
        raise request.command.error("Batch job submission failed: Invalid license specification") from None


def _read_invalid_dep(request: JobRequest, name: str, text: str | None) -> None:
    request.values["never_satisfied"] = request.read(name, kill_on_invalid_dep, text)


def _read_open_mode(request: JobRequest, name: str, text: str | None) -> None:
    word = (text or "").lower()
    if not word or not ("append".startswith(word) or "truncate".startswith(word)):
        raise request.invalid(name)
    request.values["open_mode"] = "append" if word[0] == "a" else "truncate"


def _read_folder(request: JobRequest, name: str, text: str | None) -> None:
    if not text:
        raise request.invalid(name)
    request.values["work_dir"] = os.path.abspath(request.clean(name, text))


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
    "gpus-per-socket": _read_gpus,
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
