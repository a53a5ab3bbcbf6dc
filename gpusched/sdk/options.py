"""What a submission from Python may say, and how it becomes the fields of the API."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import PurePath
from typing import Any, TypedDict

from gpusched.errors import UsageError
from gpusched.instants import parse_instant
from gpusched.model.job import TIME_LIMIT_WORDS
from gpusched.model.units import closest, parse_duration_s, parse_size_mib


class JobOptions(TypedDict, total=False):
    """Keywords of `Client.submit` and `Executor`: the API's fields, and gsub's long options where they are handier.

    Those with another meaning than the API's field of the same name say so. Sizes are texts (`"8G"`) or MiB;
    times are texts (`"4h"`), `timedelta` or seconds; instants are texts (`"now+1hour"`), `datetime` or epoch seconds.
    """

    name: str
    gpus: int | float | str
    """`2`, `0.5` of one card, `"a100:2"`; on all nodes together."""
    gpus_per_node: int
    gpu_type: str
    gpus_linked: bool
    vram: str | int
    min_vram: str | int
    gpu_ids: str
    cpus: float
    mem: str | int
    resources: Mapping[str, int]
    licenses: Mapping[str, int]
    nodes: int
    nodelist: Sequence[str]
    exclude: Sequence[str]
    constraint: str
    prefer: str
    exclusive: bool
    time: str | timedelta | float
    """Time limit; `"auto"` for one that jobs like it keep, `"unlimited"` for none whatever the default."""
    queue: str
    account: str
    qos: str
    reservation: str
    nice: int
    dependency: str
    begin: str | datetime | float
    deadline: str | datetime | float
    hold: bool
    array: str
    """Tasks, as `"0-9%4"`; the answer is the array, its tasks are `42_7`."""
    sweep: Sequence[str]
    """`["lr=1e-3,1e-4", "seed=0..4"]`."""
    max_fails: int
    never_satisfied: str
    fallback: str
    ignore_idle: bool
    key: str
    snapshot: bool | str
    """Keep the code as it is: True, or `git`, `copy`, as `gsub --snapshot`."""
    retries: int
    backoff: str | timedelta | float
    backoff_factor: float
    backoff_max: str | timedelta | float
    retry_on: Sequence[str]
    requeue: bool
    stop_signal: int
    grace: str | timedelta | float
    output: str | os.PathLike[str]
    error: str | os.PathLike[str]
    open_mode: str
    notify: Sequence[str]
    """What to tell you of: `["end", "fail"]`, `["all"]`."""
    notify_to: Sequence[str]
    log_max: str | int
    """An output file that has grown to this size is put aside."""
    log_keep: int
    chdir: str | os.PathLike[str]
    """Working directory; the current one when it is not given."""
    env: Mapping[str, str]
    """The whole environment, as for `subprocess`; this process's own when it is not given."""
    extra_env: Mapping[str, str]
    """Added to the environment."""


_SIZES = {"vram": "vram_mib", "min_vram": "min_vram_mib", "mem": "mem_mib", "log_max": "log_max_mib"}
_TIMES = {"time": "time_limit_s", "backoff": "backoff_s", "backoff_max": "backoff_max_s", "grace": "grace_s"}
_INSTANTS = {"begin": "begin_at", "deadline": "deadline_at"}
_PATHS = {"output": "stdout", "error": "stderr"}
_API_NAMES = frozenset(
    {
        *_SIZES.values(),
        *_TIMES.values(),
        *_INSTANTS.values(),
        *_PATHS.values(),
        *("gpu_fraction", "notice", "submit_dir"),
    }
)
"""Fields of a submission that JobOptions calls otherwise, or not at all."""
_FIXED = frozenset(
    {
        *("gpu_ids", "hold", "array", "sweep", "max_fails", "key", "snapshot", "backoff", "backoff_factor"),
        *("backoff_max", "retry_on", "requeue", "stop_signal", "grace", "output", "error", "open_mode", "log_max"),
        *("log_keep", "chdir", "env", "extra_env"),
    }
)
"""What a job keeps as it was submitted."""
OPTIONS = frozenset(JobOptions.__annotations__) | _API_NAMES
"""Names that a submission takes."""
CHANGES = (frozenset(JobOptions.__annotations__) - _FIXED) | {
    "gpu_fraction",
    "vram_mib",
    "min_vram_mib",
    "mem_mib",
    "time_limit_s",
    "begin_at",
    "deadline_at",
    "throttle",
}
"""Names that an update takes."""
_MEANT = {"work_dir": "chdir", "cwd": "chdir", "partition": "queue", "cpus_per_task": "cpus", "job_name": "name"}
"""Names that other schedulers and the API have for an option."""
_KEPT_OUT = ("GPUSCHED_SOCKET", "CUDA_VISIBLE_DEVICES")
"""Not the job's business: it is told anew which scheduler to talk to, and which GPUs are its own."""


def check_names(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a keyword that a function does not take. Raises: TypeError naming the one that was probably meant."""
    known = frozenset(known)
    for name in given:
        if name not in known:
            meant = _MEANT.get(name)
            near = meant if meant in known else closest(name, sorted(known))
            hint = f"; did you mean {near}=?" if near else "; see JobOptions in docs/reference/python.md"
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def spec_of(options: Mapping[str, Any], function: str = "submit", own: Iterable[str] = ()) -> dict[str, Any]:
    """The fields of the API.

    Args: function: that was called, which takes the keywords `own`, too.
    Raises: TypeError for a name that is not known; UsageError naming the option and the value that cannot be read, and
    where a job that reads its program's main module would submit again.
    """
    check_names(function, options, (*OPTIONS, *own))
    if getattr(sys.modules["__main__"], "is_loading_main", False):
        # Each job would submit what it was submitted for.
        raise UsageError(
            "this program submits jobs whenever it is imported, and a job imports it to find the function to call; "
            'put what submits under: if __name__ == "__main__":'
        )
    spec: dict[str, Any] = {}
    for name, value in options.items():
        if value is not None and name not in ("env", "extra_env", "chdir", "snapshot"):
            spec.update(_read(name, value))
    spec["work_dir"] = os.path.abspath(options.get("chdir") or os.getcwd())
    env = dict(os.environ if options.get("env") is None else options["env"])
    env.update(options.get("extra_env") or {})
    for key, text in env.items():
        if not (isinstance(key, str) and isinstance(text, str)):
            raise UsageError(f"the variable {key!r} is {text!r}; both must be texts", f"say: str({text!r})")
    spec["env"] = {key: text for key, text in env.items() if key not in _KEPT_OUT}
    # Given one by one, they are meant for the job, whatever the settings leave out.
    spec["env_named"] = sorted({*(options.get("env") or ()), *(options.get("extra_env") or ())} - {*_KEPT_OUT})
    spec["umask"] = _umask()
    return spec


def changes_of(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an update; None takes a wish back. Raises: as `spec_of`."""
    check_names("update", changes, CHANGES)
    found: dict[str, Any] = {}
    for name, value in changes.items():
        if value is None:
            found[(_SIZES | _TIMES | _INSTANTS).get(name, name)] = None
        else:
            found.update(_read(name, value))
        if name == "gpus" and value is not None:
            # Whole cards take back an earlier share of one, and the other way round.
            found = {"gpus": 1, "gpu_fraction": None, **found}
    return found


def _read(name: str, value: Any) -> dict[str, Any]:
    """Raises: UsageError naming the option and the value that cannot be read."""
    try:
        return _field(name, value)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{name}={value!r}: {error}", "see JobOptions in docs/reference/python.md") from None


def _field(name: str, value: Any) -> dict[str, Any]:
    if name in _SIZES:
        return {_SIZES[name]: parse_size_mib(value) if isinstance(value, str) else value}
    if name in _TIMES:
        if name == "time" and isinstance(value, str) and value.lower() in TIME_LIMIT_WORDS:
            return {"time_limit_s": value.lower()}
        seconds = _seconds(value, ", or as auto" if name == "time" else "")
        return {_TIMES[name]: int(seconds) if name == "time" else seconds}
    if name in _INSTANTS:
        if isinstance(value, str):
            return {_INSTANTS[name]: parse_instant(value)}
        return {_INSTANTS[name]: value.timestamp() if isinstance(value, datetime) else value}
    if name in _PATHS:
        return {_PATHS[name]: os.fspath(value)}
    if name == "gpus":
        return _gpus(value)
    if isinstance(value, PurePath):
        return {name: str(value)}
    if isinstance(value, Mapping):
        return {name: dict(value)}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return {name: list(value)}
    return {name: value}


def _seconds(value: Any, also: str) -> float:
    if isinstance(value, timedelta):
        return value.total_seconds()
    return parse_duration_s(value, also) if isinstance(value, str) else value


def _gpus(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        kind, colon, count = value.rpartition(":")
        if not colon and not count[:1].isdigit():
            kind, count = count, "1"
        try:
            number = float(count) if "." in count else int(count)
        except ValueError:
            raise ValueError("it must be a number, as '2', or a type and a number, as 'a100:2'") from None
        return {**_gpus(number), **({"gpu_type": kind} if kind else {})}
    if isinstance(value, float) and 0 < value < 1:
        return {"gpu_fraction": value}
    if value != int(value):
        raise ValueError("it must be a whole number of GPUs, or a share of one")
    return {"gpus": int(value)}


def _umask() -> int:
    # The kernel tells it without changing it, which another thread could see.
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022
