"""What a job asks for after its GPU memory ran out: more than it had, by a fixed ladder.

    a slice by memory   so many times larger, and at least what it was seen to use and a quarter more
    a share of a card   twice the share
    when no card could hold that, or the share would be a whole card: a whole card, larger than the slice was
    a whole card        the next larger card that the request admits

A job that reached its limit of host memory asks for so many times more of that, or for as much as there is.

A rung that the machines could never give, or that the job's queue would refuse, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gpusched.model.cluster import GpuView, NodeView
from gpusched.model.job import GpuShare, Request, Run
from gpusched.model.settings import Settings
from gpusched.model.states import ReasonCode
from gpusched.model.units import format_size_mib
from gpusched.model.value import replace

_STEP_MIB = 256
_SPARE = 1.25


@dataclass(frozen=True, slots=True)
class Larger:
    """Try again with this request; `text` follows "with "."""

    request: Request
    text: str


@dataclass(frozen=True, slots=True)
class NothingLarger:
    """To try again would be in vain; `text` says why."""

    text: str


def grown(
    request: Request, run: Run, nodes: Sequence[NodeView], settings: Settings, is_admitted: Callable[[Request], bool]
) -> Larger | NothingLarger | None:
    """The next rung for a request whose run ran out of memory, the GPU's or its own of the host.

    `is_admitted` says whether the machines could ever give a request and the job's queue would take it.

    None when more would not help, or nobody knows: growing is switched off, a card's size cannot be read, or processes
    of no job held memory of a card of the run, or it was the whole machine's memory that ran out. The request then
    stays as it is.
    """
    if run.reason is ReasonCode.HOST_OUT_OF_MEMORY or settings.life.oom_growth <= 1:
        return None
    if run.reason is ReasonCode.MEM_LIMIT:
        return _more_host_memory(request, nodes, settings, is_admitted)
    if not request.gpus or not run.gpus:
        return None
    views = {gpu.uuid: gpu for node in nodes for gpu in node.gpus}
    had = [(share, views[share.uuid]) for share in run.gpus if share.uuid in views]
    if any(node.gpu_error is not None for node in nodes) or len(had) < len(run.gpus):
        return None
    if any(view.vram_total_mib is None or view.foreign_mib > settings.gpu.baseline_mib for _, view in had):
        return None
    totals = sorted({gpu.vram_total_mib for gpu in views.values() if gpu.is_present and gpu.vram_total_mib is not None})
    had_mib = max(_mib(share, view) for share, view in had)
    before = _words(request, had_mib)
    for wish in _ladder(request, run, had_mib, totals, settings.life.oom_growth):
        if is_admitted(wish):
            return Larger(wish, f"{_words(wish, wish.min_vram_mib or 0)} instead of {before}")
    return NothingLarger(f"not tried again, since it can have no more GPU memory here than {before}")


def _more_host_memory(
    request: Request, nodes: Sequence[NodeView], settings: Settings, is_admitted: Callable[[Request], bool]
) -> Larger | NothingLarger | None:
    had_mib = request.mem_mib or settings.isolation.default_mem_mib
    if not had_mib:
        return None
    wanted_mib = max(had_mib * settings.life.oom_growth, had_mib + _STEP_MIB)
    most_mib = max((node.mem_mib for node in nodes), default=0)
    for mib in (-(-int(wanted_mib) // _STEP_MIB) * _STEP_MIB, most_mib):
        wish = replace(request, mem_mib=mib)
        if mib > had_mib and is_admitted(wish):
            words = f"{format_size_mib(mib)} of host memory instead of {format_size_mib(had_mib)}"
            return Larger(wish, words)
    return NothingLarger(f"not tried again, since it can have no more host memory here than {format_size_mib(had_mib)}")


def _ladder(request: Request, run: Run, had_mib: int, totals: Sequence[int], growth: float) -> Iterator[Request]:
    if request.vram_mib is not None:
        seen_mib = 0 if run.peak_vram_mib is None else run.peak_vram_mib / len(run.gpus) * _SPARE
        wanted_mib = max(request.vram_mib * growth, seen_mib, request.vram_mib + _STEP_MIB)
        yield replace(request, vram_mib=-(-int(wanted_mib) // _STEP_MIB) * _STEP_MIB)
    elif request.gpu_fraction is not None and request.gpu_fraction < 0.5:
        yield replace(request, gpu_fraction=2 * request.gpu_fraction)
    for total_mib in totals:
        if total_mib > had_mib:
            least_mib = max(total_mib, request.min_vram_mib or 0)
            yield replace(request, vram_mib=None, gpu_fraction=None, min_vram_mib=least_mib)


def _mib(share: GpuShare, view: GpuView) -> int:
    """What a run could use of a card."""
    if share.vram_mib is not None:
        return share.vram_mib
    total_mib = view.vram_total_mib or 0
    return total_mib if share.fraction is None else int(total_mib * share.fraction)


def _words(request: Request, mib: int) -> str:
    cards = "a whole GPU" if request.gpus == 1 else f"{request.gpus} whole GPUs"
    if request.vram_mib is not None:
        return f"{format_size_mib(request.vram_mib)} of VRAM"
    if request.gpu_fraction is not None:
        return f"{request.gpu_fraction:g} of a GPU"
    return f"{cards} of {format_size_mib(mib)}"
