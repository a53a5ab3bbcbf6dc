"""Variants of a job: requests of which it starts with the first that can start.

A pending job has its first variant as its request, and one that runs the variant that it was started with, so that
whatever looks at a request needs to know nothing of variants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpusched.model.job import Job, JobSpec, Request, Variant
from gpusched.model.units import format_amount, format_duration, format_size_mib
from gpusched.model.value import replace


def with_variant(spec: JobSpec, number: int) -> JobSpec:
    """The job with one of its requests, counted from 0 in the order preferred."""
    if not spec.variants:
        return spec
    one = spec.variants[number]
    return replace(
        spec,
        request=one.request,
        layout=one.layout,
        time_limit_s=one.time_limit_s,
        time_limit_source=one.time_limit_source,
    )


def each_variant(spec: JobSpec) -> tuple[JobSpec, ...]:
    """The job with each of its requests alone, as jobs without variants."""
    return tuple(replace(with_variant(spec, number), variants=()) for number in range(len(spec.variants))) or (spec,)


def of_specs(specs: Sequence[JobSpec], stated: Sequence[tuple[str, ...]]) -> JobSpec:
    """One job with the requests of these, which are equal in all else. Args: stated: of each, see `Variant`."""
    first = replace(specs[0], variants=())
    if len(specs) == 1:
        return first
    made = (
        Variant(one.request, one.layout, one.time_limit_s, one.time_limit_source, names)
        for one, names in zip(specs, stated, strict=True)
    )
    return replace(first, variants=tuple(made))


def why_not_distinct(specs: Sequence[JobSpec]) -> str | None:
    """A sentence on two variants that ask for the same; None if all differ."""
    known: dict[object, int] = {}
    for number, one in enumerate(specs, 1):
        same = known.setdefault((one.request, one.layout, one.time_limit_s, one.time_limit_source), number)
        if same != number:
            return f"variants {same} and {number} ask for the same"
    return None


def pending_again(job: Job) -> Job:
    """The job with all of its variants, as it waits for its next run."""
    return replace(job, spec=with_variant(job.spec, 0)) if job.spec.variants else job


def started_with(spec: JobSpec) -> int | None:
    """Which variant the request of a job that has started is; None for none, as after a change of the request."""
    alike = [number for number, one in enumerate(spec.variants) if one.request == spec.request]
    timed = [number for number in alike if spec.variants[number].time_limit_s == spec.time_limit_s]
    return next(iter((*timed, *alike)), None)


def with_requests(spec: JobSpec, change: Callable[[Request], Request]) -> JobSpec:
    """The job with a change of all of its requests."""
    variants = tuple([replace(one, request=change(one.request)) for one in spec.variants])
    return replace(spec, request=change(spec.request), variants=variants)


def with_request(spec: JobSpec, request: Request) -> JobSpec:
    """The job with another request in place of the one that it was started with."""
    number = started_with(spec)
    variants = tuple([replace(one, request=request) if at == number else one for at, one in enumerate(spec.variants)])
    return replace(spec, request=request, variants=variants)


def gpu_request(request: Request) -> str:
    """GPUs requested on all nodes together, in the syntax of gsub: `2`, `a100:2`, `0.5`; `0` for none.

    VRAM of each is added as in `1(8192M)`; a share of one card on each of 2 nodes is `2x0.5`.
    """
    if not request.gpus:
        return "0"
    count = str(request.total_gpus)
    if (fraction := request.card_fraction) is not None:
        count = f"{fraction:g}" if request.nodes == 1 else f"{request.nodes}x{fraction:g}"
    text = f"{request.gpu_type}:{count}" if request.gpu_type else count
    return f"{text}({request.vram_mib}M)" if request.vram_mib is not None else text


def gpu_demand(request: Request) -> tuple[object, ...]:
    """The values that `gpu_request` writes: equal for requests that look alike there."""
    if not request.gpus:
        return ()
    fraction = request.card_fraction
    return request.total_gpus if fraction is None else (request.nodes, fraction), request.gpu_type, request.vram_mib


def gpu_demands(spec: JobSpec) -> tuple[tuple[object, ...], ...]:
    """Those of all variants of a pending job."""
    if not spec.variants:
        return (gpu_demand(spec.request),)
    return tuple(dict.fromkeys(gpu_demand(one.request) for one in spec.variants))


def gpu_requests(spec: JobSpec, *, is_pending: bool) -> str:
    """As `gpu_request`; while the job is pending those of all its variants, `a100:2|rtx3090:4`."""
    if not (is_pending and spec.variants):
        return gpu_request(spec.request)
    return "|".join(dict.fromkeys(gpu_request(one.request) for one in spec.variants))


def _nodes_option(request: Request) -> str:
    if request.bundles is not None and request.bundles.nodes_max > request.nodes:
        return f"-N {request.nodes}-{request.bundles.nodes_max}"
    return f"-N {request.nodes}" if request.nodes > 1 else ""


_WORDS: tuple[Callable[[Request, int | None], str], ...] = (
    lambda request, limit_s: f"-g {gpu_request(request)}",
    lambda request, limit_s: f"-c {format_amount(request.cpus)}",
    lambda request, limit_s: f"-m {format_size_mib(request.mem_mib)}" if request.mem_mib else "",
    lambda request, limit_s: _nodes_option(request),
    lambda request, limit_s: f"-C {request.constraint}" if request.constraint else "",
    lambda request, limit_s: f"-w {','.join(request.nodelist)}" if request.nodelist else "",
    lambda request, limit_s: "" if limit_s is None else f"-t {format_duration(limit_s)}",
)


def variant_names(parts: Sequence[tuple[Request, int | None]]) -> list[str]:
    """Each variant by the options in which they differ, `-g a100:2 -c 8`. Args: parts: requests with time limits."""
    words = [[make(*part) for make in _WORDS] for part in parts]
    differing = [at for at in range(len(_WORDS)) if len({one[at] for one in words}) > 1]
    names = [" ".join(one[at] for at in differing if one[at]) for one in words]
    if len(set(names)) < len(names) or "" in names:
        return [f"variant {number}{f' ({name})' if name else ''}" for number, name in enumerate(names, 1)]
    return names


def names_of(spec: JobSpec) -> list[str]:
    """The variants of a job by the options in which they differ."""
    return variant_names([(one.request, one.time_limit_s) for one in spec.variants])
