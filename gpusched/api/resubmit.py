"""Resubmission: the request of an old job, with some fields changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gpusched.access import Act, check
from gpusched.api.schema import SPEC_FIELDS, VARIANT_FIELDS, check_fields, read_object
from gpusched.api.validate import Submission, read_spec, store_environment
from gpusched.errors import Refused, UsageError
from gpusched.lifecycle.transitions import refuse_to_repeat
from gpusched.model import spec
from gpusched.model.commands import Caller
from gpusched.model.execution import unpack_environment
from gpusched.model.job import Job, JobSpec, Launch, RetryRule, TaskLayout
from gpusched.model.launch import Launch as DeclaredLaunch
from gpusched.model.layout import LAYOUT_KEYS, as_asked, replaced_by
from gpusched.model.option import fields_of
from gpusched.model.request import GPU_KEYS
from gpusched.model.request import Request as DeclaredRequest
from gpusched.model.request import TaskLayout as DeclaredLayout
from gpusched.model.settings import Settings
from gpusched.model.value import asdict, replace
from gpusched.ports import Store
from gpusched.scheduler.admission import as_submitted

_OF_GPUS = ("vram_mib", "min_vram_mib", "is_linked")
_PARTS = frozenset({"request", "retry", "launch", "layout"})
_ANEW: dict[str, Any] = {
    "key": None,
    "hold": False,
    "dependency": None,
    "begin_at": None,
    "deadline_at": None,
    "start_when": None,
    "pipeline": None,
    "step": None,
    "fallback_of": None,
}
"""Fields of a single submission rather than of the work: a repetition has them only if it sets them."""


def read_resubmission(
    jobs: Iterable[Job], changes_json: Any, caller: Caller, settings: Settings, store: Store
) -> Submission:
    """The specs of these jobs again, each with the same changes. Raises: Forbidden, UsageError, Refused."""
    raw = read_object(changes_json, "spec")
    changes = check_fields(raw, SPEC_FIELDS)
    payloads: dict[str, bytes] = {}
    specs: list[JobSpec] = []
    for job in jobs:
        check(caller, Act.REPEAT, job, settings)
        refuse_to_repeat(job)
        if job.spec.interactive is not None:
            raise Refused(f"job {job.shown_id} ran in the foreground of a command", "start it again with: grun")
        specs.append(_spec(job, raw, changes, settings, store, payloads))
    if len(specs) > 1 and "key" in changes:
        raise UsageError("a key identifies one job, not several", "repeat the jobs one by one, each with a --key")
    return Submission(tuple(specs), payloads)


def _spec(
    job: Job,
    raw: Mapping[str, Any],
    changes: Mapping[str, Any],
    settings: Settings,
    store: Store,
    payloads: dict[str, bytes],
) -> JobSpec:
    old = as_submitted(job.spec)
    for name in ("argv", "script", "script_name", "script_path"):
        if name in changes:
            raise UsageError(
                f"{name} cannot change when job {job.shown_id} is resubmitted", "submit it as a separate job"
            )
    _check_variants(job, raw)
    # A submission of the changes alone, and one without them.
    plain = read_spec({"argv": ["true"]}, settings, {})
    request, retry = _request_values(old, raw, changes), _retry_values(old.retry, raw, changes)
    fresh = read_spec({**changes, **request, **retry, "argv": ["true"]}, settings, {})
    rest = {
        name: getattr(fresh, name)
        for name in JobSpec.__struct_fields__
        if name not in _PARTS and (name in raw or getattr(fresh, name) != getattr(plain, name))
    }
    if "time_limit_s" in raw:
        rest["time_limit_source"] = fresh.time_limit_source
    if job.task is not None and old.array is not None:
        rest.setdefault("array", replace(old.array, tasks=str(job.task)))
    if "work_dir" in raw and "snapshot" not in raw:
        # A folder other than the copy; relative outputs go there, too.
        rest["snapshot"], raw = None, {"submit_dir": None, **raw}
    launch = _launch(old.launch, fresh.launch, raw, changes, settings, store, payloads)
    parts = {"request": fresh.request, "layout": _layout(old, fresh, raw), "retry": fresh.retry, "launch": launch}
    if old.variants and "variants" not in raw:
        parts |= {"request": old.request, "layout": old.layout}
    return replace(old, **{**_ANEW, **rest, **parts})


def _check_variants(job: Job, raw: Mapping[str, Any]) -> None:
    """Refuse a change of one amount of a job with variants. Raises: Refused."""
    odd = [name for name in raw if name in VARIANT_FIELDS]
    if job.spec.variants and odd and not raw.get("variants"):
        raise Refused(
            f"job {job.shown_id} has {len(job.spec.variants)} variants: which of them is to change is not clear",
            f"name all of them anew: gsub --resubmit {job.shown_id} -g 'a100:2|rtx3090:4'",
        )


def _layout(old: JobSpec, fresh: JobSpec, raw: Mapping[str, Any]) -> TaskLayout | None:
    """The tasks of the repetition; cores that the old job did not state are not stated now either."""
    is_stated = "cpus" in raw or (old.layout is not None and old.layout.cpus_per_task is not None)
    if fresh.layout is None or is_stated:
        return fresh.layout
    layout = replace(fresh.layout, cpus_per_task=None)
    return None if layout == TaskLayout() else layout


def _retry_values(old: RetryRule, raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in asdict(old).items() if name not in raw}
    if "retry_on" in kept:
        kept["retry_on"] = list(kept["retry_on"])
    return {**kept, **{name: changes[name] for name in fields_of(spec.RetryRule) if name in changes}}


def _request_values(old: JobSpec, raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The resources in the form of a submission: the old ones, overridden by the changes."""
    kept: dict[str, Any] = asdict(old.request)
    is_new_wish = not GPU_KEYS.isdisjoint(raw)
    if is_new_wish and changes.get("gpus", 1) == 0 and not changes.get("gpus_per_node"):
        kept.update(dict.fromkeys(_OF_GPUS))
    replaced = replaced_by(raw) | (GPU_KEYS if is_new_wish else frozenset())
    asked = {name: value for name, value in as_asked(old.request, old.layout).items() if name not in replaced}
    fields = {**fields_of(DeclaredRequest), **fields_of(DeclaredLayout)}
    for name, field in fields_of(DeclaredRequest).items():
        if name in LAYOUT_KEYS or field.attribute not in kept or (is_new_wish and name in GPU_KEYS):
            continue
        value = kept[field.attribute]
        if name in ("licenses", "resources"):
            value = dict(value)
        elif isinstance(value, tuple):
            value = list(value)
        if value is not None and name not in raw:
            asked[name] = value
    return {**asked, **{name: changes[name] for name in fields if name in changes}}


def _launch(
    old: Launch,
    fresh: Launch,
    raw: Mapping[str, Any],
    changes: Mapping[str, Any],
    settings: Settings,
    store: Store,
    payloads: dict[str, bytes],
) -> Launch:
    given = {
        name: getattr(fresh, name)
        for name in fields_of(DeclaredLaunch)
        if name in raw and name not in ("env", "env_named", "script")
    }
    if "env" in changes:
        try:
            env = unpack_environment(store.payload(old.env_sha))
        except KeyError:
            raise Refused("the environment of the old job is missing from the database", "submit it again") from None
        # Added variables were named, and the old environment is already filtered.
        given["env_sha"] = store_environment({**env, **changes["env"]}, settings, payloads)
    return replace(old, **given)
