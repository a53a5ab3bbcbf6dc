"""Handlers about pipelines: submit, show, resume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from aiohttp import web
from msgspec import Meta

from gpusched.access import Hidden, is_admin
from gpusched.api import validate
from gpusched.api.asked import OneJob, RequestBody, RequestQuery, Text, about, read_asked, schema_of
from gpusched.api.handlers.jobs import change, with_task_ids
from gpusched.api.remarks import remarks
from gpusched.api.requests import respond, words
from gpusched.api.schema import SPEC_FIELDS, check_fields, read_object
from gpusched.api.visibility import Viewer
from gpusched.errors import Forbidden, GpuschedError, NotFound, Refused, UsageError, UserError
from gpusched.lifecycle import pipelines as policy
from gpusched.model.commands import PipelineStep, ResumePipeline, SubmitPipeline
from gpusched.model.job import Job, JobSpec
from gpusched.model.pipeline import Pipeline
from gpusched.model.settings import Settings
from gpusched.model.spec import MAX_NAME
from gpusched.model.units import parse_pipeline_id, printable
from gpusched.model.value import replace
from gpusched.ports.tables import PIPELINES

MAX_SOURCE = 16 << 20
MAX_NEEDS = 1 << 16
_OF_THE_PIPELINE = ("env", "env_named", "key")
"""Fields of a job that a step does not have."""


class StepBody(RequestBody):
    """A step of a pipeline."""

    step: Annotated[Text, about("Name of the step, unique in the pipeline.")] = ""
    needs: Annotated[str, about("Other steps in Slurm's words: prep, afterany:train:test.", max_length=MAX_NEEDS)] = ""
    where: Annotated[Text, about("What messages call it: file and line.")] = ""
    environment: Annotated[int, about("Place of its environment, from 0.", ge=0, le=10**9)] = 0
    spec: Annotated[Any, Meta(extra_json_schema={"$ref": "#/components/schemas/Spec"})] = None


class PipelineBody(RequestBody):
    steps: Annotated[list[Any], Meta(min_length=1, title="steps", extra_json_schema={"items": schema_of(StepBody)})]
    name: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    source: Annotated[str, Meta(max_length=MAX_SOURCE)] = ""
    environments: tuple[dict[str, str] | None, ...] = ()
    env_named: tuple[list[str] | None, ...] = ()
    dry_run: bool = False


async def submit(viewer: Viewer, body: PipelineBody) -> web.Response:
    """Submit all jobs of a pipeline at once, or with dry_run check them; pipeline is its id, jobs are ids by step."""
    service, caller = viewer.service, viewer.caller
    payloads: dict[str, bytes] = {}
    environments = [one or {} for one in body.environments or (None,)]
    named = [one or [] for one in body.env_named] or [[] for _ in environments]
    if len(named) != len(environments):
        raise UsageError("env_named must hold a list of names for each environment", body.hint)
    shas = []
    excluded: set[str] = set()
    for environment, names in zip(environments, named, strict=True):
        checked = check_fields({"env": environment, "env_named": names}, SPEC_FIELDS)
        env, left_out = validate.sift_environment(
            checked.get("env", {}), checked.get("env_named", ()), service.settings
        )
        shas.append(validate.store_environment(env, service.settings, payloads))
        excluded.update(left_out)
    reader = _Reader(viewer, shas, payloads)
    steps = reader.read(body.steps)
    if not body.dry_run:
        texts = len(body.source) + sum(map(len, payloads.values()))
        service.pace.submission(caller, [step.spec for step in steps], texts, service.settings.limit)
    answer = await service.daemon.ask(
        SubmitPipeline(caller, body.name or "pipeline", body.source, steps, payloads, body.dry_run)
    )
    if reader.notes and not body.dry_run:
        answer["notes"] = [*reader.notes, *answer.get("notes", ())]
    return respond(**answer, **({"env_excluded": sorted(excluded)} if excluded else {}))


class _Reader:
    """Reads the steps of one submission, which are untrusted."""

    def __init__(self, viewer: Viewer, shas: Sequence[str], payloads: dict[str, bytes]) -> None:
        self._viewer = viewer
        self._settings: Settings = viewer.service.settings
        self._requests = viewer.service.requests
        self._shas = shas
        self._payloads = payloads
        self.notes: list[str] = []
        """What is accepted and probably not meant so."""

    def read(self, given: Sequence[Any]) -> list[PipelineStep]:
        """The steps, with unique names and acyclic needs that name existing steps."""
        if len(given) > self._settings.limit.batch:
            raise Refused(
                f"{len(given)} steps in one pipeline; the maximum is {self._settings.limit.batch}",
                "split it",
            )
        steps: list[PipelineStep] = []
        mistakes: list[GpuschedError] = []
        for one in given:
            try:
                steps.append(self._step(one))
            except UserError as error:
                mistakes.append(error)
        if mistakes:
            raise type(mistakes[0]).of(mistakes)
        known = {step.name: step for step in steps}
        if len(known) < len(steps):
            twice = next(step for step in steps if known[step.name] is not step)
            raise UsageError(f"{twice.where}: step {twice.name} is defined twice", "give each step its own name")
        for step in steps:
            for name in step.needs.steps:
                if name not in known:
                    raise UsageError(f"{step.where}: there is no step {name} to wait for", "name another step")
        circle = policy.find_circle({step.name: step.needs for step in steps})
        if circle:
            where = known[circle[0]].where
            raise UsageError(f"{where}: the steps wait for each other: {' -> '.join(circle)}", "remove one of them")
        return steps

    def _step(self, given: Any) -> PipelineStep:
        asked = read_asked(read_object(given, "a step"), StepBody)
        name = asked.step
        shown = printable(name, 100)
        where = printable(asked.where or f"step {shown}", 300)
        if not policy.STEP_NAME.fullmatch(name):
            raise UsageError(f"{where}: {shown!r} is not a step name", f"a name has {policy.STEP_NAMES}")
        try:
            needs = policy.parse_needs(asked.needs)
        except ValueError as error:
            raise UsageError(f"{where}: {error}", "write needs as: prep, afterany:train") from None
        try:
            spec = with_task_ids(read_object(asked.spec, "spec"), self._viewer)
            made = self._spec(name, spec, asked.environment)
        except Refused as error:
            raise Refused(f"{where}: {error.message}", error.hint) from None
        except (NotFound, UsageError) as error:
            raise type(error)(f"{where}: {error.message}", error.hint) from None
        if made.dependency and needs.all and (needs.is_any or "?" in made.dependency):
            raise UsageError(f"{where}: needs and a dependency combine only when all must hold", "use ',' in both")
        return PipelineStep(name, made, needs, where)

    def _spec(self, step: str, given: Mapping[str, Any], place: int) -> JobSpec:
        values = check_fields(given, SPEC_FIELDS)
        for key in _OF_THE_PIPELINE:
            if key in values:
                raise UsageError(f"{key} is not allowed in a pipeline step", "remove it")
        if place >= len(self._shas):
            raise UsageError(f"there is no environment {place}", "see GET /v1/openapi.json")
        spec = validate.read_spec(values, self._settings, self._payloads, self._shas[place])
        said = remarks(values, spec, self._viewer.service.scheduler.now())
        self.notes += [f"step {printable(step, 60)}: {text}" for text in said]
        return replace(spec, request=self._requests.setdefault(spec.request, spec.request))


class ResumePipelineBody(RequestBody):
    path_id: str


async def resume(viewer: Viewer, body: ResumePipelineBody) -> web.Response:
    """Rerun the steps that did not end COMPLETED; jobs are the new ids by step."""
    return respond(**await change(viewer.service, ResumePipeline(viewer.caller, _number(body.path_id))))


async def show(viewer: Viewer, query: OneJob) -> web.Response:
    """A pipeline with its steps and its text."""
    service = viewer.service
    pipeline = _find(_number(query.path_id), viewer)
    _check(pipeline, viewer)
    jobs = service.jobs_of_pipeline(pipeline.number)
    steps, names = policy.steps_of(jobs), policy.names_of(jobs)
    fallbacks = policy.fallbacks_of(jobs)
    facts = service.facts_of([*steps.values(), *fallbacks])
    now = {job_id: steps[name].id for job_id, name in names.items()}
    spared = policy.pipeline_status(jobs).not_needed
    shown = [
        {
            **viewer.job_json(job, facts(job)),
            # By the last job of each step: resumed steps have new jobs.
            "depends_on": list(dict.fromkeys(str(now.get(one, one)) for one in policy.conditions_of(job).job_ids)),
            "needs": _needs_json(job, names),
            "not_needed": name in spared,
        }
        for name, job in steps.items()
    ]
    return respond(
        pipeline={
            **_summary(pipeline, jobs),
            "source": pipeline.source,
            "steps": shown,
            "fallbacks": [viewer.job_json(job, facts(job)) for job in fallbacks],
        }
    )


def _find(number: int, viewer: Viewer) -> Pipeline:
    found = viewer.service.scheduler.store.find(PIPELINES, [number])
    if not found:
        raise policy.unknown(number)
    return found[number]


def _check(pipeline: Pipeline, viewer: Viewer) -> None:
    """Refuse to show another user's pipeline, whose text and commands are private. Raises: Forbidden, NotFound."""
    if _is_whole(pipeline, viewer):
        return
    if viewer.is_restricted:
        hidden = policy.unknown(pipeline.number)
        raise Hidden(hidden.message, hidden.hint)
    raise Forbidden(
        f"pipeline {pipeline.id} belongs to {pipeline.user}, not to {viewer.caller.user}",
        "list your own jobs with: gq --me",
    )


def _is_whole(pipeline: Pipeline, viewer: Viewer) -> bool:
    return pipeline.uid == viewer.caller.uid or is_admin(viewer.caller, viewer.service.settings)


def _needs_json(job: Job, names: Mapping[int, str]) -> list[dict[str, Any]]:
    found = []
    for one in policy.conditions_of(job).conditions:
        if one.job_id:
            name = names.get(one.job_id)
            found.append({"kind": one.kind, "step": name, "id": str(one.job_id), "delay_s": one.delay_s})
    return found


class PipelinesQuery(RequestQuery):
    ids: Annotated[str, about("comma-separated ids of pipelines")] = ""


async def listing(viewer: Viewer, query: PipelinesQuery) -> web.Response:
    """The state of pipelines; those with unfinished jobs unless ids are given."""
    scheduler = viewer.service.scheduler
    named = words(query.ids)
    wanted = {_number(word) for word in named}
    if not named:
        active = {job.spec.pipeline for job in scheduler.state.jobs.values() if job.spec.pipeline is not None}
        wanted = {number for word in active if (number := parse_pipeline_id(word)) is not None}
    found = [
        one
        for one in scheduler.store.find(PIPELINES, sorted(wanted)).values()
        if not viewer.is_restricted or _is_whole(one, viewer)
    ]
    jobs = {one.number: viewer.service.jobs_of_pipeline(one.number) for one in found}
    rows = [_summary(one, jobs[one.number]) for one in found]
    for one, row in zip(found, rows, strict=True):
        if not _is_whole(one, viewer):
            row["name"] = "-"
    return respond(pipelines=rows)


def _summary(pipeline: Pipeline, jobs: Sequence[Job]) -> dict[str, Any]:
    status = policy.pipeline_status(jobs)
    return {
        "id": pipeline.id,
        "name": pipeline.name,
        "user": pipeline.user,
        "submit_at": pipeline.submit_at,
        "state": status.state,
        "counts": dict(status.counts),
        "not_needed": len(status.not_needed),
        "fallback_counts": dict(status.fallbacks),
        "steps_total": len(policy.steps_of(jobs)),
    }


def _number(text: str) -> int:
    number = parse_pipeline_id(text)
    if number is None:
        raise UsageError(f"{printable(text, 40)!r} is not a pipeline id, such as p42", "see: gq --tree")
    return number
