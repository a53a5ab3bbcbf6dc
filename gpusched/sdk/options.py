"""Options of a submission from Python, and their conversion to the fields of the API."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from gpusched.errors import UsageError
from gpusched.instants import parse_instant
from gpusched.model.option import GPU_VARIANTS, gpus
from gpusched.model.spec import FIELDS, TIME_LIMIT_WORDS, UPDATABLE
from gpusched.model.units import closest, is_variable, parse_duration_s, parse_size_mib, printable
from gpusched.model.variant_words import BOTH, BOTH_HINT, read_variant

_NAMES = {name: field.name for field in FIELDS.values() if field.keyword for name in (field.name, field.keyword)}
"""The API field of each keyword, and of the field's own name."""
_OF_THE_PROCESS = ("chdir", "env", "extra_env", "snapshot")
"""Options that are not fields, or that `spec_of` or the client looks up."""
OPTIONS = frozenset({*_NAMES, *_OF_THE_PROCESS}) - {"work_dir"}
"""Options of a submission."""
CHANGES = frozenset({name for name, field in _NAMES.items() if field in UPDATABLE} | {"throttle"})
"""Options of an update."""
_MEANT = {"work_dir": "chdir", "cwd": "chdir", "partition": "queue", "cpus_per_task": "cpus", "job_name": "name"}
"""Names that other schedulers and the API use for an option."""
_KEPT_OUT = ("GPUSCHED_SOCKET", "CUDA_VISIBLE_DEVICES")
"""Not passed on: the job gets its own scheduler and GPUs."""


def check_names(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Reject keywords that a function does not take. Raises: TypeError that suggests the closest name."""
    known = frozenset(known)
    for name in given:
        if name not in known:
            meant = _MEANT.get(name)
            near = meant if meant in known else closest(name, sorted(known))
            hint = f"; did you mean {near}=?" if near else "; see JobOptions in docs/reference/python.md"
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def spec_of(options: Mapping[str, Any], function: str = "submit", own: Iterable[str] = ()) -> dict[str, Any]:
    """The fields of the API.

    Args: function: name of the called function, which also takes the keywords `own`.
    Raises: TypeError for an unknown name; UsageError naming the option and the unreadable value, and if a job that
    imports its program's main module would submit again.
    """
    check_names(function, options, (*OPTIONS, *own))
    if getattr(sys.modules["__main__"], "is_loading_main", False):
        # Each job would repeat this submission.
        raise UsageError(
            "this program submits jobs whenever it is imported, and a job imports it to find the function to call; "
            'put what submits under: if __name__ == "__main__":'
        )
    spec: dict[str, Any] = {}
    for name, value in options.items():
        if value is not None and name not in _OF_THE_PROCESS:
            found = _read(name, value)
            if "variants" in found and "variants" in spec:
                raise UsageError(BOTH, BOTH_HINT)
            spec.update(found)
    spec["work_dir"] = os.path.abspath(options.get("chdir") or os.getcwd())
    env = dict(os.environ if options.get("env") is None else options["env"])
    for key in options.get("extra_env") or ():
        if isinstance(key, str) and not is_variable(key):
            raise UsageError(
                f"extra_env has {printable(key, 40)!r}, which is not the name of a variable: letters, digits and _",
                "for example: extra_env={'LR': '0.1'}",
            )
    env.update(options.get("extra_env") or {})
    for key, text in env.items():
        if not (isinstance(key, str) and isinstance(text, str)):
            raise UsageError(f"the variable {key!r} is {text!r}; both must be strings", f"write: str({text!r})")
    spec["env"] = {key: text for key, text in env.items() if key not in _KEPT_OUT}
    # Variables given explicitly are passed on even if the settings exclude them.
    spec["env_named"] = sorted({*(options.get("env") or ()), *(options.get("extra_env") or ())} - {*_KEPT_OUT})
    spec["umask"] = _umask()
    return spec


def missing_folder(options: Mapping[str, Any]) -> list[str]:
    """A note on a working directory that is not here: it may be on another node, or be made before the job starts."""
    folder = options.get("chdir")
    if folder is None or os.path.isdir(folder):
        return []
    shown = printable(os.path.abspath(folder))
    return [f"there is no folder {shown} here; the job fails unless there is one where and when it starts"]


def changes_of(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an update; None resets an option. Raises: as `spec_of`."""
    check_names("update", changes, CHANGES)
    found: dict[str, Any] = {}
    for name, value in changes.items():
        if value is None:
            found[_NAMES.get(name, name)] = None
        else:
            found.update(_read(name, value))
        if name == "gpus" and value is not None:
            # Whole cards reset an earlier share and vice versa.
            found = {"gpus": 1, "gpu_fraction": None, **found}
    return found


def _read(name: str, value: Any) -> dict[str, Any]:
    """Raises: UsageError naming the option and the unreadable value."""
    try:
        return _field(name, value)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{name}={value!r}: {error}", "see JobOptions in docs/reference/python.md") from None


def _field(keyword: str, value: Any) -> dict[str, Any]:
    if keyword == "gpus":
        return _gpus(value)
    name = _NAMES.get(keyword, keyword)
    if name == "variants":
        return {name: [_variant(one) for one in value]}
    if isinstance(value, str) and keyword != name:
        # Under its own name a field takes the API's values.
        return {name: _read_text(name, value)}
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, float) and name == "time_limit_s":
        return {name: int(value)}
    if isinstance(value, datetime):
        return {name: value.timestamp()}
    if isinstance(value, os.PathLike):
        return {name: os.fspath(value)}
    if isinstance(value, Mapping):
        return {name: dict(value)}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return {name: list(value)}
    return {name: value}


def _variant(value: Any) -> dict[str, Any]:
    """A further request: its options as in a shell, or a mapping of keywords."""
    if isinstance(value, str):
        return read_variant(value)
    if not isinstance(value, Mapping):
        raise ValueError("each variant must be options, '-g rtx3090:4 -c 16', or a dict, {'gpus': 'rtx3090:4'}")
    found: dict[str, Any] = {}
    for name, part in value.items():
        found.update(_field(name, part))
    return found


def _read_text(name: str, text: str) -> Any:
    """Parse a size, duration or time given as text; other texts are returned unchanged."""
    if name.endswith("_mib"):
        return parse_size_mib(text)
    if name.endswith("_at"):
        return parse_instant(text)
    if name == "time_limit_s":
        return text.lower() if text.lower() in TIME_LIMIT_WORDS else parse_duration_s(text, ", or as auto")
    return parse_duration_s(text) if name.endswith("_s") else text


def _gpus(value: Any) -> dict[str, Any]:
    if isinstance(value, str) and "|" in value:
        found = {key: part for key, part in gpus(value).items() if part is not None}
        return {**found, "variants": list(found.pop(GPU_VARIANTS))}
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
    # Read from the kernel: changing it would be visible to other threads.
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022
