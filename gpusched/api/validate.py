"""From a client's JSON to checked values. Nothing a client sends is trusted, not even our own client's."""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache
from math import isfinite
from typing import Any

from gpusched.api.alerting import read_alerting, read_parts
from gpusched.api.arrays import read_array
from gpusched.api.interactive import read_interactive
from gpusched.api.resources import RESETS, read_request, request_name, request_values
from gpusched.api.schema import (
    JOB_FIELDS,
    MAX_NAME,
    MAX_UNITS,
    REQUEST_FIELDS,
    RETRY_FIELDS,
    SPEC_FIELDS,
    UPDATE_FIELDS,
    Field,
)
from gpusched.errors import Refused, UsageError
from gpusched.lifecycle.dependencies import parse_dependency
from gpusched.lifecycle.retry import parse_retry_on
from gpusched.model.execution import pack_environment
from gpusched.model.job import TIME_LIMIT_WORDS, JobSpec, Launch, Notice, Request, RetryRule
from gpusched.model.settings import Settings
from gpusched.model.units import closest, printable
from gpusched.model.value import replace

_ARGV_LIMIT = 1 << 20
MOST_OVER = 2
"""An environment may be so many times its limit before what is not passed on is taken out."""
_SNAPSHOT = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Submission:
    """Checked jobs of one request and the texts they refer to by SHA-256."""

    specs: tuple[JobSpec, ...]
    payloads: dict[str, bytes]
    env_excluded: tuple[str, ...] = ()
    """Variables that are left out of their environment."""


def read_object(value: object, what: str) -> dict[str, Any]:
    """A JSON object, or a usage error that says what should have been one."""
    if not isinstance(value, dict):
        raise UsageError(f"{what} must be a JSON object", "see GET /v1/openapi.json")
    return value


def check_fields(values: Mapping[str, Any], fields: Mapping[str, Field]) -> dict[str, Any]:
    """Every value checked for type and range. Null means absent. Raises: UsageError."""
    checked = {}
    for name, value in values.items():
        field = fields.get(name)
        if field is None:
            near = closest(name, fields)
            hint = f"did you mean {near!r}?" if near else "known fields: " + ", ".join(sorted(fields))
            raise UsageError(f"unknown field {printable(name, 60)!r}", hint)
        if value is None and field.nullable:
            continue
        _check_length(name, value, field)
        checked[name] = _check(name, value, field)
    return checked


def _check_length(name: str, value: Any, field: Field) -> None:
    """Refuse texts of a length that nobody means: what they are compared with or made into grows with it."""
    if isinstance(value, str):
        size = len(value)
    elif isinstance(value, (list, dict)):
        size = sum(len(word) + 1 for word in value if isinstance(word, str))
    else:
        return
    if size > field.most:
        raise UsageError(f"{name} has {size} characters; at most {field.most} are taken", "write it shorter")


def _check(name: str, value: Any, field: Field) -> Any:
    kind = field.kind
    if kind == "string":
        if not isinstance(value, str):
            raise _wrong(name, value, "a text")
        if "\0" in value and name != "script":
            raise UsageError(f"{name} holds a NUL byte, which no path, name or argument can", "remove it")
        if field.choices and value not in field.choices:
            raise _wrong(name, value, "one of " + ", ".join(field.choices))
        _check_text(name, value)
    elif kind == "boolean":
        if not isinstance(value, bool):
            raise _wrong(name, value, "true or false")
    elif kind in ("integer", "number"):
        _check_number(name, value, field)
    elif kind == "strings":
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise _wrong(name, value, "a list of texts")
        if any("\0" in word for word in value):
            raise UsageError(f"{name} holds a NUL byte, which no argument can", "remove it")
        _check_text(name, "".join(value))
    elif kind == "map":
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            raise _wrong(name, value, "an object of texts")
        if not _stands_for_bytes("".join((*value, *value.values()))):
            for key, text in value.items():
                _check_text(f"{name}.{key}", key)
                _check_text(f"{name}.{key}", text)
    elif kind == "counts":
        if not isinstance(value, dict):
            raise _wrong(name, value, "an object of names and whole numbers")
        for key, count in value.items():
            _check_text(f"{name}.{key}", key)
            _check_number(f"{name}.{printable(key, 60)}", count, _COUNT)
    else:
        notice = read_object(value, name)
        if set(notice) != {"signal", "before_s", "main_only"}:
            raise _wrong(name, sorted(notice), "an object with signal, before_s and main_only")
        _check_number("notice.signal", notice["signal"], Field("integer", "", 1, 64))
        _check_number("notice.before_s", notice["before_s"], LAUNCH_NOTICE_BEFORE)
        if not isinstance(notice["main_only"], bool):
            raise _wrong("notice.main_only", notice["main_only"], "true or false")
    return value


def _check_text(name: str, value: str) -> None:
    if not _stands_for_bytes(value):
        raise UsageError(f"{printable(name, 60)} holds a text that stands for no bytes", "remove it")


def _stands_for_bytes(text: str) -> bool:
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


_COUNT = Field("integer", "", 1, MAX_UNITS)
LAUNCH_NOTICE_BEFORE = Field("integer", "", 0, JOB_FIELDS["time_limit_s"].high)


def _check_number(name: str, value: Any, field: Field) -> None:
    if value in field.words:
        return
    whole = field.kind == "integer"
    is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not is_number or (isinstance(value, float) and not isfinite(value)):
        wanted = ", ".join(("a whole number" if whole else "a number", *field.words[:-1]))
        raise _wrong(name, value, " or ".join((wanted, *field.words[-1:])))
    low, high = field.low, field.high
    if low is not None and (value < low or (field.exclusive_low and value <= low)):
        least = f"above {low:g}" if field.exclusive_low else f"at least {low:g}"
        raise UsageError(f"{name} is {printable(str(value), 60)}; it must be {least}", "see gsub --help")
    if high is not None and value > high:
        raise UsageError(f"{name} is {printable(str(value), 60)}; it must be at most {high:g}", "see gsub --help")


def _wrong(name: str, value: object, wanted: str) -> UsageError:
    return UsageError(f"{name} is {printable(repr(value), 60)}; it must be {wanted}", "see gsub --help")


def read_submission(
    spec_json: Any, batch: Any, settings: Settings, request_cache: dict[Request, Request]
) -> Submission:
    """Check one submission: a spec, or a spec that many shell lines share. Raises: UsageError, Refused."""
    values = check_fields(read_object(spec_json, "spec"), SPEC_FIELDS)
    payloads: dict[str, bytes] = {}
    if batch is not None:
        if values.get("interactive") is not None:
            raise UsageError("many jobs cannot run in one foreground", "submit them with: gsub --batch FILE")
        if not isinstance(batch, list) or not all(isinstance(line, str) for line in batch):
            raise UsageError("batch must be a list of shell lines", "see gsub --help")
        if len(batch) > settings.limit.batch:
            raise Refused(
                f"{len(batch)} jobs in one submission; at most {settings.limit.batch} are taken at once",
                "split the file, for example with: split -l 100000",
            )
        if "key" in values:
            raise UsageError("a key stands for one job, not for a batch", "give each job a --key of its own")
        if any("\0" in line for line in batch):
            raise UsageError("a batch line holds a NUL byte, which no command can", "remove it")
        for line in batch:
            _check_text("batch", line)
        if values.get("array") is not None or values.get("sweep") is not None:
            raise UsageError("a batch has a job for each line and can be no array", "submit them one by one")
        values.setdefault("argv", ["/bin/sh"])
    env, excluded = sift_environment(values.get("env", {}), values.get("env_named", ()), settings)
    values["env"] = env
    base = read_spec(values, settings, payloads)
    request = request_cache.setdefault(base.request, base.request)
    base = replace(base, request=request)
    if batch is None:
        return Submission((base,), payloads, excluded)
    specs = []
    for line in batch:
        launch = replace(base.launch, argv=("/bin/sh", "-c", line), script_name="batch")
        name = base.name if "name" in values else _first_word(line)
        specs.append(replace(base, launch=launch, name=name))
    return Submission(tuple(specs), payloads, excluded)


def read_spec(
    values: Mapping[str, Any], settings: Settings, payloads: dict[str, bytes], env_sha: str | None = None
) -> JobSpec:
    """One job of checked fields; its texts go to the payloads. Raises: UsageError, Refused.

    Args: env_sha: of an environment that is among the payloads already, in place of `env`.
    """
    launch = _read_launch(values, settings, payloads, env_sha)
    command = posixpath.basename(launch.argv[0]) if launch.argv else "script"
    name = values.get("name") or launch.script_name or command or "job"
    if len(name) > MAX_NAME:
        raise UsageError(f"the job name has {len(name)} characters; at most {MAX_NAME} are kept", "use -J")
    job = {key: values[key] for key in JOB_FIELDS if key in values and key not in ("name", "hold")}
    job.setdefault("queue", settings.default.queue)
    job.update(limit_values(job))
    check_words(job)
    request = read_request(values, settings)
    interactive, retry = read_interactive(values, request, _read_retry(values), settings)
    return JobSpec(
        name=name,
        request=request,
        launch=launch,
        retry=retry,
        interactive=interactive,
        hold=values.get("hold", False),
        alerting=read_alerting(values),
        array=read_array(values),
        **job,
    )


def limit_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The time limit of these values, as a JobSpec has it; nothing where they do not say."""
    if "time_limit_s" not in values:
        return {}
    limit = values["time_limit_s"]
    is_word = limit in TIME_LIMIT_WORDS
    return {"time_limit_s": None if is_word else limit, "time_limit_source": limit if is_word else ""}


def check_words(values: Mapping[str, Any]) -> None:
    """Names are single words; a dependency follows its grammar. Raises: UsageError."""
    for key in ("queue", "account", "qos", "reservation"):
        word = values.get(key)
        if word is not None and (not word.isprintable() or not word or " " in word or len(word) > MAX_NAME):
            raise UsageError(f"{key} is {printable(repr(word), 60)}; it must be one word", "see gsub --help")
    snapshot = values.get("snapshot")
    if snapshot is not None and not _SNAPSHOT.fullmatch(snapshot):
        raise UsageError(f"snapshot is {printable(repr(snapshot), 60)}; it must be 32 hexadecimal digits", "")
    mark = values.get("key")
    if mark is not None and (not mark.isprintable() or not mark.strip() or len(mark) > MAX_NAME):
        raise UsageError(
            f"key is {printable(repr(mark), 60)}; it must be a printable text of at most {MAX_NAME} characters",
            "for example: gsub --key nightly-2026-11-21 -- ./nightly",
        )
    fallback = values.get("fallback")
    if fallback is not None and (not fallback.strip() or len(fallback) > _ARGV_LIMIT):
        raise UsageError(
            "the fallback is empty" if not fallback.strip() else "the fallback is longer than 1 MiB",
            "write a shell line, as in: --fallback 'python report.py'",
        )
    if values.get("dependency"):
        try:
            parse_dependency(values["dependency"])
        except ValueError as error:
            raise UsageError(str(error), "write it as afterok:41 or afterok:41:42,afterany:43") from None


def _read_retry(values: Mapping[str, Any]) -> RetryRule:
    wanted = {key: values[key] for key in RETRY_FIELDS if key in values}
    if "retry_on" in wanted:
        try:
            wanted["retry_on"] = parse_retry_on(",".join(wanted["retry_on"]))
        except ValueError as error:
            raise UsageError(str(error), "see --retry-on in gsub --help") from None
    return RetryRule(**wanted)


def _read_launch(
    values: Mapping[str, Any], settings: Settings, payloads: dict[str, bytes], env_sha: str | None
) -> Launch:
    argv: Sequence[str] = values.get("argv", ())
    script = values.get("script")
    script_sha = None
    if script is not None:
        script_sha = _keep(_script_bytes(script, settings), payloads)
    elif not argv or not argv[0]:
        raise UsageError("there is no command to run", "give a script, or a command after --")
    if sum(len(word) + 9 for word in argv) > _ARGV_LIMIT:
        raise UsageError("the command line is longer than 1 MiB", "put it into a script")
    work_dir = values.get("work_dir", "/")
    for name, folder in (("work_dir", work_dir), ("submit_dir", values.get("submit_dir", "/"))):
        if not folder.startswith("/"):
            raise UsageError(f"{name} is {printable(folder, 100)!r}; it must be absolute", "use -D /path")
    notice = values.get("notice")
    rest = {
        key: values[key]
        for key in (
            "script_name",
            "umask",
            "stdout",
            "stderr",
            "open_mode",
            "stop_signal",
            "grace_s",
            "gpu_ids",
            "submit_dir",
            "log_max_mib",
            "log_keep",
        )
        if key in values
    }
    return Launch(
        argv=tuple(argv),
        script_sha=script_sha,
        env_sha=env_sha or store_environment(values.get("env", {}), settings, payloads),
        work_dir=work_dir,
        notice=None if notice is None else Notice(**notice),
        **{"script_name": None, **rest},
    )


def sift_environment(
    given: Mapping[str, str], named: Collection[str], settings: Settings
) -> tuple[dict[str, str], tuple[str, ...]]:
    """An environment without what the settings leave out and nobody named; and the names of what is left out.

    Raises: Refused.
    """
    limit = int(settings.limit.environment_mib * (1 << 20))
    whole = sum(map(len, given)) + sum(map(len, given.values()))
    if whole > MOST_OVER * limit:
        # Whatever of it is left out: each name would be compared with each pattern.
        raise Refused(
            f"the environment holds {whole} characters, and the limit is {limit}", "submit with --export=NONE"
        )
    dropped, kept = _exclusion(settings.submit.env_exclude)
    explicit = frozenset(named)
    excluded = {key for key in given if key not in explicit and dropped.fullmatch(key) and not kept.fullmatch(key)}
    return {key: value for key, value in given.items() if key not in excluded}, tuple(sorted(excluded))


@lru_cache(maxsize=4)
def _exclusion(patterns: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What names match that are left out, and what those of them match that are kept after all."""

    def any_of(found: Iterable[str]) -> re.Pattern[str]:
        # Without a pattern nothing matches, which is what (?!) says.
        return re.compile("|".join(map(translate, found)) or "(?!)", re.IGNORECASE)

    return (
        any_of(pattern for pattern in patterns if not pattern.startswith("!")),
        any_of(pattern[1:] for pattern in patterns if pattern.startswith("!")),
    )


def store_environment(env: Mapping[str, str], settings: Settings, payloads: dict[str, bytes]) -> str:
    """Put an environment among the payloads; returns its SHA-256. Raises: UsageError, Refused."""
    limit = int(settings.limit.environment_mib * (1 << 20))
    for key, value in env.items():
        if not key or "=" in key or "\0" in key or "\0" in value:
            raise UsageError(
                f"the environment variable {printable(key, 60)!r} cannot be passed on",
                "unset it, or use --export",
            )
    packed = pack_environment(env)
    if len(packed) > limit:
        largest = max(env, key=lambda key: len(env[key]))
        raise Refused(
            f"the environment holds {len(packed)} bytes, more than the limit of {limit}; "
            f"the largest variable is {printable(largest, 60)}",
            "unset it, or submit with --export=NONE",
        )
    return _keep(packed, payloads)


def _script_bytes(script: str, settings: Settings) -> bytes:
    body = script.encode("utf-8", "surrogateescape")
    limit = int(settings.limit.script_mib * (1 << 20))
    if len(body) > limit:
        raise Refused(
            f"the script is {len(body) / (1 << 20):.1f} MiB; the limit is {settings.limit.script_mib:g} MiB",
            "keep data in files, or raise [limit] script_mib in the config file",
        )
    if b"\0" in body:
        raise UsageError("the script holds a NUL byte; it is not a text", "submit a program with: gsub -- ./program")
    if not body.startswith(b"#!"):
        raise UsageError("the script does not begin with #!", "let its first line be #!/bin/bash")
    return body


def _keep(body: bytes, payloads: dict[str, bytes]) -> str:
    sha = hashlib.sha256(body).hexdigest()
    payloads[sha] = body
    return sha


def _first_word(line: str) -> str:
    words = line.split(maxsplit=1)
    return posixpath.basename(words[0])[:MAX_NAME] if words else "batch"


def read_changes(values: Any, settings: Settings) -> dict[str, Any]:
    """Fields of an update; null resets one to its default. Raises: UsageError."""
    given = read_object(values, "changes")
    changes = check_fields(given, UPDATE_FIELDS)
    check_words(changes)
    if not given:
        raise UsageError("nothing to change", "for example: gctl update 42 time=2h")
    changes = {**{key: value for key, value in changes.items() if key not in REQUEST_FIELDS}, **request_values(changes)}
    changes.update(read_parts(changes))
    if "cpus" in changes:
        changes["cpus"] = float(changes["cpus"])
    resets: dict[str, Any] = {
        **RESETS,
        "cpus": settings.default.cpus,
        "nice": 0,
        "retries": 0,
        "queue": settings.default.queue,
        "account": "",
        "qos": "",
        "ignore_idle": False,
        "notify": (),
        "notify_to": (),
    }
    for key in (request_name(name) for name, value in given.items() if value is None):
        if key == "name":
            raise UsageError("a job cannot be without a name", "for example: gctl update 42 name=train")
        changes[key] = resets.get(key)
    return {**changes, **limit_values(changes)}
