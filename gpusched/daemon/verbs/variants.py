"""Variants of a submission: each is admitted by itself, and those that can never run are left out with a note."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.verbs.admission import check_submission, complete_all, with_auto_limits
from gpusched.errors import Refused
from gpusched.model.commands import Caller
from gpusched.model.job import Job, JobSpec, Variant
from gpusched.model.layout import replaced_by
from gpusched.model.request import GPU_KEYS
from gpusched.model.spec import FIELDS
from gpusched.model.value import replace
from gpusched.model.variants import each_variant, names_of


def with_variants(
    specs: Sequence[JobSpec], caller: Caller, tx: TickTransaction, copies: int = 1
) -> tuple[list[JobSpec], list[str]]:
    """The submissions with the variants that can run, and a note on each one left out.

    Variants get their time limits and sizes here, and so does the request of a job that has any: that of its first
    variant that is admitted. Args: copies: number of jobs that each of them stands for.
    Raises: Refused if none of the variants is admitted.
    """
    done, notes = list(specs), list[str]()
    for at, spec in enumerate(done):
        if spec.variants:
            done[at], said = _admitted(spec, caller, tx, copies)
            notes += said
    return done, list(dict.fromkeys(notes))


def _admitted(spec: JobSpec, caller: Caller, tx: TickTransaction, copies: int) -> tuple[JobSpec, list[str]]:
    names = names_of(spec)
    kept: list[Variant] = []
    refused: list[tuple[str, Refused]] = []
    notes: list[str] = []
    for one, variant, name in zip(each_variant(spec), spec.variants, names, strict=True):
        try:
            (timed,), said = with_auto_limits([one], caller.user, tx)
            (whole,) = complete_all([timed], caller, tx)
            _check_engine(whole, len(names))
            check_submission([whole], caller, tx, copies)
        except Refused as error:
            refused.append((name, error))
            continue
        notes += [f"with {name}: {text}" for text in said if text]
        kept.append(Variant(whole.request, whole.layout, whole.time_limit_s, whole.time_limit_source, variant.stated))
    if not kept:
        raise _none_admitted(refused)
    notes += [f"the variant {name} is left out: {error.message}" for name, error in refused]
    first = kept[0]
    spec = replace(
        spec,
        request=first.request,
        layout=first.layout,
        time_limit_s=first.time_limit_s,
        time_limit_source=first.time_limit_source,
    )
    return replace(spec, variants=tuple(kept) if len(kept) > 1 else ()), notes


VARIANTS = "variants"
"""The change that names all further requests of a job."""


def check_is_clear(job: Job, changes: Mapping[str, Any]) -> None:
    """Refuse a change of what the variants of a job state differently. Raises: Refused."""
    touched = _replaced_by(changes)
    for variant in job.spec.variants:
        own = {FIELDS[name].attribute: FIELDS[name].word for name in variant.stated}
        both = sorted(touched & _replaced_by(own))
        if both:
            word = next((own[name] for name in both if name in own), both[0])
            names = " and ".join(names_of(job.spec))
            raise Refused(
                f"the variants {names} of job {job.shown_id} differ in {word}: which of them is to change is not clear",
                f"name all of them anew: gctl update {job.shown_id} gpus='a100:2|rtx3090:4', or keep the first alone: "
                f"gctl update {job.shown_id} or=",
            )


def merged(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The changes of the first request that make a further one. Args: common: of all; own: what it states."""
    replaced = _replaced_by(own)
    resets = {} if GPU_KEYS.isdisjoint(own) else {"gpu_fraction": None, "gpu_type": None}
    return {**{name: value for name, value in common.items() if name not in replaced}, **resets, **own}


def _replaced_by(names: Iterable[str]) -> frozenset[str]:
    found = replaced_by(names)
    return found if GPU_KEYS.isdisjoint(found) else found | GPU_KEYS


def _check_engine(spec: JobSpec, count: int) -> None:
    """Refuse variants of a job that Slurm gets, which has one request for each job. Raises: Refused."""
    if spec.is_for_slurm:
        text = f"the job is handed over to Slurm, where a job has one request, and this one has {count} variants"
        raise Refused(text, "name one of them, or keep the job here: --engine local", "engine")
    if spec.burst:
        text = f"--burst may hand the job over to Slurm, where a job has one request, and this one has {count} variants"
        raise Refused(text, "name one of them, or leave out --burst", "burst")
    if spec.launch.image is not None:
        text = f"a job with an image has one request, for whose nodes it is pulled, and this one has {count} variants"
        raise Refused(text, "name one of them, or leave out --image", "image")


def _none_admitted(refused: Sequence[tuple[str, Refused]]) -> Refused:
    _, first = refused[0]
    if len({error.message for _, error in refused}) == 1:
        return first
    texts = [f"with {name}: {error.message}" for name, error in refused]
    return Refused(f"none of its {len(refused)} variants can run; {'; '.join(texts)}", first.hint, first.about)
