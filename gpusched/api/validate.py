"""Checked values from a client's JSON. All input is untrusted, including that of our own client."""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache
from typing import Any

from gpusched.api.arrays import read_array
from gpusched.api.interactive import read_interactive
from gpusched.api.remarks import remarks
from gpusched.api.resources import read_request, request_name, request_values
from gpusched.api.schema import SPEC_FIELDS, UPDATE_FIELDS, check_fields, check_text, read_object, stands_for_bytes
from gpusched.errors import Concerning, Refused, UsageError
from gpusched.lifecycle.dependencies import parse_dependency
from gpusched.lifecycle.output_paths import letters_of
from gpusched.lifecycle.retry import parse_retry_on
from gpusched.model import spec as declared
from gpusched.model.alert_events import EACH_TASK, EVENTS, parse_events
from gpusched.model.container import is_image_file, read_bind, why_no_image, why_not_mounted
from gpusched.model.execution import pack_environment
from gpusched.model.job import Alerting, JobSpec, Launch, Notice, Request, RetryRule, TaskLayout
from gpusched.model.launch import Launch as DeclaredLaunch
from gpusched.model.layout import states_tasks
from gpusched.model.option import fields_of
from gpusched.model.request import Request as DeclaredRequest
from gpusched.model.settings import Settings
from gpusched.model.spec import MAX_NAME, TIME_LIMIT_WORDS
from gpusched.model.units import printable
from gpusched.model.value import replace
from gpusched.model.variant_words import over_first
from gpusched.model.variants import of_specs, why_not_distinct

_ARGV_LIMIT = 1 << 20
MOST_OVER = 2
"""Multiple of the environment's limit that is accepted before excluded variables are removed."""
_SNAPSHOT = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Submission:
    """The checked jobs of one request, and the texts they refer to by SHA-256."""

    specs: tuple[JobSpec, ...]
    """Of a batch only what its jobs have in common."""
    payloads: dict[str, bytes]
    env_excluded: tuple[str, ...] = ()
    """Variables removed from their environment."""
    lines: Sequence[str] | None = None
    """Of a batch: a job each."""
    is_named: bool = True
    """Whether the jobs of a batch have the name of the spec."""
    notes: tuple[str, ...] = ()
    """What is accepted and probably not meant so."""


def read_submission(
    spec_json: Any, batch: Any, settings: Settings, request_cache: dict[Request, Request], now: float
) -> Submission:
    """Check one submission: a spec, or a spec shared by many shell lines. Raises: UsageError, Refused."""
    values = check_fields(read_object(spec_json, "spec"), SPEC_FIELDS)
    payloads: dict[str, bytes] = {}
    if batch is not None:
        if values.get("interactive") is not None:
            raise UsageError("many jobs cannot run in one foreground", "submit them with: gsub --batch FILE")
        if not isinstance(batch, list) or not all(isinstance(line, str) for line in batch):
            raise UsageError("batch must be a list of shell lines", "see gsub --help")
        if len(batch) > settings.limit.batch:
            raise Refused(
                f"{len(batch)} jobs in one submission; at most {settings.limit.batch} are accepted at once",
                "split the file, for example with: split -l 100000",
            )
        _check_lines(batch)
        if values.get("array") is not None or values.get("sweep") is not None:
            raise UsageError("a batch has a job for each line and cannot be an array", "submit them one by one")
        values.setdefault("argv", ["/bin/sh"])
    env, excluded = sift_environment(values.get("env", {}), values.get("env_named", ()), settings)
    values["env"] = env
    base = read_spec(values, settings, payloads)
    request = request_cache.setdefault(base.request, base.request)
    base = replace(base, request=request)
    notes = tuple(remarks(values, base, now, batch or ()))
    return Submission((base,), payloads, excluded, batch, is_named="name" in values, notes=notes)


def _check_lines(batch: Sequence[str]) -> None:
    """Refuse a batch with a line that is not a command. Raises: UsageError naming the line."""
    for number, line in enumerate(batch, 1):
        if len(line) > _ARGV_LIMIT:
            raise UsageError(f"line {number} of the batch is longer than 1 MiB", "put it into a script")
    # Together: one by one they take ten times as long.
    whole = "".join(batch)
    if "\0" not in whole and stands_for_bytes(whole):
        return
    for number, line in enumerate(batch, 1):
        if "\0" in line:
            raise UsageError(f"line {number} of the batch holds a NUL byte, which no command can", "remove it")
        check_text(f"line {number} of the batch", line)


def read_spec(
    values: Mapping[str, Any], settings: Settings, payloads: dict[str, bytes], env_sha: str | None = None
) -> JobSpec:
    """One job from checked fields; its texts are added to the payloads. Raises: UsageError, Refused.

    Args: env_sha: of an environment already among the payloads, in place of `env`.
    """
    launch = _read_launch(values, settings, payloads, env_sha)
    command = posixpath.basename(launch.argv[0]) if launch.argv else "script"
    name = values.get("name") or launch.script_name or command or "job"
    if len(name) > MAX_NAME:
        raise UsageError(f"the job name has {len(name)} characters; at most {MAX_NAME} are kept", "use -J")
    job = {**given_of(declared.JobSpec, values), "name": name}
    job.setdefault("queue", settings.default.queue)
    job.update(limit_values(job))
    check_words(job)
    request, layout = read_request(values, settings)
    _check_rotation(launch, layout, request, settings)
    with Concerning("array"):
        array = read_array(values)
    interactive, retry = read_interactive(values, request, _read_retry(values), settings)
    others = job.pop("variants", ())
    made = JobSpec(
        request=request,
        launch=launch,
        retry=retry,
        layout=layout,
        interactive=interactive,
        alerting=read_alerting(values),
        array=array,
        **job,
    )
    return read_variants(made, values, others, settings) if others else made


def read_variants(
    first: JobSpec, values: Mapping[str, Any], others: Sequence[Mapping[str, Any]], settings: Settings
) -> JobSpec:
    """The job with these further requests. Raises: UsageError naming the variant.

    Args: values: of the first request; others: what each further one states.
    """
    specs, stated = [first], list[tuple[str, ...]]([()])
    for number, own in enumerate(others, 2):
        whole = over_first(values, own)
        try:
            request, layout = read_request(whole, settings)
        except UsageError as error:
            raise UsageError(f"variant {number}: {error.message}", error.hint, error.about) from None
        _check_rotation(first.launch, layout, request, settings)
        specs.append(replace(first, request=request, layout=layout, **limit_values(own)))
        stated.append(tuple(sorted(own)))
    if (why := why_not_distinct(specs)) is not None:
        raise UsageError(why, "leave one of them out, or have them differ")
    return of_specs(specs, stated)


def _check_rotation(launch: Launch, layout: TaskLayout | None, request: Request, settings: Settings) -> None:
    """Refuse what would leave files without a limit. Raises: UsageError."""
    if launch.log_max_mib is None or not (launch.ranks and states_tasks(layout, request)):
        return
    if any("t" in letters_of(pattern) for pattern in (launch.stdout or settings.default.output, launch.stderr or "")):
        raise UsageError(
            "--log-max rotates the file of a node, and %t gives each rank its own", "leave one of them out"
        )


def given_of(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The given values of one part of a job, by attribute."""
    found = {field.attribute: values[name] for name, field in fields_of(kind).items() if name in values}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def limit_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The time limit in these values, in the form of a JobSpec; empty if not given."""
    if "time_limit_s" not in values:
        return {}
    limit = values["time_limit_s"]
    is_word = limit in TIME_LIMIT_WORDS
    return {"time_limit_s": None if is_word else limit, "time_limit_source": limit if is_word else ""}


def check_words(values: Mapping[str, Any]) -> None:
    """Check texts that have their own syntax. Raises: UsageError."""
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
            hint = "write it as afterok:41 or afterok:41:42,afterany:43"
            raise UsageError(str(error), hint, "dependency") from None


def _read_retry(values: Mapping[str, Any]) -> RetryRule:
    wanted = given_of(declared.RetryRule, values)
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
    for name, path in (("work_dir", work_dir), *((name, values.get(name)) for name in ("submit_dir", "script_path"))):
        if path is not None and not path.startswith("/"):
            raise UsageError(f"{name} is {printable(path, 100)!r}; it must be absolute", "use /path, or -D /path")
    chosen = [(name, values[name]) for name in ("venv", "conda") if values.get(name) is not None]
    if len(chosen) > 1:
        raise UsageError("venv and conda were both given", "use one of them")
    for name, path in chosen:
        if not path.startswith("/") or ":" in path:
            raise UsageError(
                f"{name} is {printable(path, 100)!r}; it must be an absolute folder without :", "use /path"
            )
    container = _read_container(values, work_dir)
    notice = values.get("notice")
    env_sha = env_sha or store_environment(values.get("env", {}), settings, payloads)
    rest = {
        "script_name": None,
        # A job of Slurm's commands starts its tasks itself, with srun.
        "ranks": not values.get("slurm") and values.get("interactive") is None,
        **given_of(DeclaredLaunch, values),
        **container,
        "argv": tuple(argv),
        "script_sha": script_sha,
        "env_sha": env_sha,
        "work_dir": work_dir,
        "notice": None if notice is None else Notice(**notice),
    }
    rest.pop("env_named", None)
    return Launch(**rest)


def _read_container(values: Mapping[str, Any], work_dir: str) -> dict[str, Any]:
    """The image and what is mounted, in the form of a Launch. Raises: UsageError."""
    image, inside = values.get("image"), values.get("container_workdir")
    if image is None:
        for name, option in (("binds", "--bind"), ("container_workdir", "--container-workdir")):
            if values.get(name):
                raise UsageError(f"{option} requires --image", "add --image IMAGE")
        return {}
    image = image.removeprefix("docker://")
    if is_image_file(image) and not posixpath.isabs(image):
        image = posixpath.normpath(posixpath.join(work_dir, image))
    if (why := why_no_image(image)) is not None:
        raise UsageError(
            f"--image: {why}", "for example: --image docker.io/pytorch/pytorch:2.4.0, or --image /data/x.sif", "image"
        )
    chosen = [name for name in ("venv", "conda") if values.get(name) is not None]
    if chosen:
        raise UsageError(
            f"--{chosen[0]} and --image were both given", "activate the environment in the container, or leave one out"
        )
    if inside is not None and (not posixpath.isabs(inside) or not inside.isprintable()):
        raise UsageError(f"--container-workdir is {printable(inside, 100)!r}; it must be absolute", "use /path")
    if ":" in work_dir or "," in work_dir:
        raise UsageError(
            f"the working directory {printable(work_dir, 100)!r} has a : or a comma, and cannot be mounted", "use -D"
        )
    for text in values.get("binds", ()):
        try:
            bind = read_bind(text)
        except ValueError as error:
            raise UsageError(f"--bind: {error}", "for example: --bind /data:/data:ro", "binds") from None
        if (why := why_not_mounted(bind.source)) is not None:
            raise UsageError(f"--bind: {why}", "mount one of your folders: --bind /data:/data", "binds")
    return {"image": image}


def sift_environment(
    given: Mapping[str, str], named: Collection[str], settings: Settings
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The environment without excluded variables, unless requested by name; and the names of the removed ones.

    Raises: Refused.
    """
    limit = int(settings.limit.environment_mib * (1 << 20))
    whole = sum(map(len, given)) + sum(map(len, given.values()))
    if whole > MOST_OVER * limit:
        # Checked before exclusion, which compares each name with each pattern.
        raise Refused(
            f"the environment holds {whole} characters, and the limit is {limit}", "submit with --export=NONE"
        )
    dropped, kept = _exclusion(settings.submit.env_exclude)
    explicit = frozenset(named)
    excluded = {key for key in given if key not in explicit and dropped.fullmatch(key) and not kept.fullmatch(key)}
    return {key: value for key, value in given.items() if key not in excluded}, tuple(sorted(excluded))


@lru_cache(maxsize=4)
def _exclusion(patterns: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Patterns of the names to exclude, and of the exceptions among them."""

    def any_of(found: Iterable[str]) -> re.Pattern[str]:
        # (?!) matches nothing, for an empty list of patterns.
        return re.compile("|".join(map(translate, found)) or "(?!)", re.IGNORECASE)

    return (
        any_of(pattern for pattern in patterns if not pattern.startswith("!")),
        any_of(pattern[1:] for pattern in patterns if pattern.startswith("!")),
    )


def store_environment(env: Mapping[str, str], settings: Settings, payloads: dict[str, bytes]) -> str:
    """Add an environment to the payloads; returns its SHA-256. Raises: UsageError, Refused."""
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
        raise UsageError("the script holds a NUL byte; it is not text", "submit a program with: gsub -- ./program")
    if not body.startswith(b"#!"):
        raise UsageError("the script does not begin with #!", "make #!/bin/bash its first line")
    return body


def _keep(body: bytes, payloads: dict[str, bytes]) -> str:
    sha = hashlib.sha256(body).hexdigest()
    payloads[sha] = body
    return sha


def read_changes(values: Any, settings: Settings) -> dict[str, Any]:
    """Fields of an update; null resets one to its default. Raises: UsageError."""
    given = read_object(values, "changes")
    changes = check_fields(given, UPDATE_FIELDS)
    check_words(changes)
    if not given:
        raise UsageError("nothing to change", "for example: gctl update 42 time=2h")
    requested = fields_of(DeclaredRequest)
    changes = {**{key: value for key, value in changes.items() if key not in requested}, **request_values(changes)}
    changes.update(read_parts(changes))
    if "cpus" in changes:
        changes["cpus"] = float(changes["cpus"])
    if "variants" in changes:
        # What each further request states, and its changes of the first.
        changes["variants"] = tuple((tuple(sorted(own)), read_changes(own, settings)) for own in changes["variants"])
    resets = {"cpus": settings.default.cpus, "queue": settings.default.queue}
    for key in (key for key, value in given.items() if value is None):
        if key == "name":
            raise UsageError("the job name is empty", "for example: gctl update 42 name=train")
        changes[request_name(key)] = resets.get(key, UPDATE_FIELDS[key].default)
    return {**changes, **limit_values(changes)}


MOST_TARGETS = 20
MAX_TARGET = 200
_ADDRESS = re.compile(r"[\w!#$%&'*+/=?^`{|}~.-]+@[\w.-]+")


def read_alerting(values: Mapping[str, Any]) -> Alerting | None:
    """Events and targets of a job's alerts; None for none. Raises: UsageError."""
    found = read_parts(values)
    alerting = Alerting(found.get("notify", ()), found.get("notify_to", ()))
    if alerting.on:
        return alerting
    if alerting.targets:
        shown = printable(alerting.targets[0], 60)
        raise UsageError(
            f"{shown} is a target of alerts, but no event is named", f"add --notify, with {', '.join(EVENTS)}"
        )
    return None


def read_parts(values: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """`notify` and `notify_to` if given, each checked by itself. Raises: UsageError."""
    found: dict[str, tuple[str, ...]] = {}
    if "notify" in values:
        try:
            words = parse_events(",".join(values["notify"]))
        except ValueError as error:
            raise UsageError(str(error), "see --notify in gsub --help") from None
        found["notify"] = words if set(words) - {EACH_TASK} else ()
    if "notify_to" in values:
        targets = found["notify_to"] = tuple(dict.fromkeys(values["notify_to"]))
        for target in targets:
            if not _is_name(target):
                shown = printable(repr(target), 60)
                raise UsageError(f"{shown} is neither a target nor a mail address", "see docs/howto/alerts.md")
        if len(targets) > MOST_TARGETS:
            raise UsageError(f"{len(targets)} targets for one job; at most {MOST_TARGETS} are allowed", "name fewer")
    return found


def _is_name(target: str) -> bool:
    """Whether it is a valid target name or mail address."""
    if not target or not target.isprintable() or set(target) & set(" ,") or len(target) > MAX_TARGET:
        return False
    return "@" not in target or _ADDRESS.fullmatch(target) is not None
