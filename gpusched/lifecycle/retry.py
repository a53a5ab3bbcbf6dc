"""Retries of failed runs: conditions and backoff."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import log
from signal import Signals

from gpusched.model.bundles import on_each_node
from gpusched.model.cluster import GpuView, NodeView
from gpusched.model.job import GpuShare, Request, RetryRule, Run
from gpusched.model.settings import Settings
from gpusched.model.states import JobState, ReasonCode
from gpusched.model.units import format_size_mib
from gpusched.model.value import replace

CLASSES = ("exit", "signal", "oom", "timeout", "node_fail")
"""Error classes for `retry_on`."""

_GROUPS = {"fail": ("exit", "signal", "oom"), "all": CLASSES}
_CODES = re.compile(r"(\d{1,3})(?:-(\d{1,3}))?")
_HIGHEST_CODE = 255
_JITTER = 0.25


@dataclass(frozen=True, slots=True)
class Failure:
    """How a run failed. `kind` is one of CLASSES, or `launch` or `unbooked`, which are never retried."""

    kind: str
    exit_code: int | None = None
    signal: int | None = None


def failure_of(run: Run) -> Failure | None:
    """The failure of an ended run; None when it did not fail or was ended on purpose."""
    if run.outcome is JobState.TIMEOUT:
        kind = "timeout"
    elif run.outcome is JobState.OUT_OF_MEMORY:
        kind = "oom"
    elif run.outcome is JobState.NODE_FAIL:
        kind = "node_fail"
    elif run.outcome is not JobState.FAILED:
        return None
    elif run.reason is ReasonCode.JOB_LAUNCH_FAILURE:
        kind = "launch"
    elif run.reason is ReasonCode.GPU_UNBOOKED_USE:
        # The same command would fail again.
        kind = "unbooked"
    else:
        kind = "exit" if run.signal is None else "signal"
    return Failure(kind, run.exit_code, run.signal)


def wants_retry(rule: RetryRule, failure: Failure) -> bool:
    """Whether the rule covers this failure, regardless of the retries left.

    A listed exit code or signal matches whatever the class of the failure, except after a timeout, a node failure,
    a failed launch and use of a GPU that was not booked. A signal's name also matches exit code 128+N, a shell's
    exit code for a child killed by that signal.
    """
    if failure.kind in ("launch", "unbooked"):
        return False
    if failure.kind in rule.retry_on:
        return True
    if failure.kind in ("timeout", "node_fail"):
        return False
    return any(_names(word, failure) for word in rule.retry_on if word not in CLASSES)


def _names(word: str, failure: Failure) -> bool:
    if word.startswith("SIG"):
        number = Signals[word].value
        return failure.signal == number or failure.exit_code == 128 + number
    low, _, high = word.partition("-")
    return failure.exit_code is not None and int(low) <= failure.exit_code <= int(high or low)


def parse_retry_on(text: str) -> tuple[str, ...]:
    """Parse `--retry-on`: classes, exit codes, ranges and signals, separated by commas.

    `fail` means exit, signal and oom; `all` every class. Returns canonical words in the given order,
    without duplicates. Raises: ValueError with a sentence that quotes the bad word.
    """
    words: list[str] = []
    for part in text.split(","):
        words.extend(_canonical(part.strip()))
    return tuple(dict.fromkeys(words))


def _canonical(word: str) -> tuple[str, ...]:
    lower = word.lower()
    if lower in CLASSES:
        return (lower,)
    if lower in _GROUPS:
        return _GROUPS[lower]
    codes = _CODES.fullmatch(word) if word.isascii() else None
    if codes:
        return (_exit_codes(word, int(codes[1]), int(codes[2] or codes[1])),)
    name = word.upper() if word.upper().startswith("SIG") else "SIG" + word.upper()
    if name in Signals.__members__:
        return (name,)
    raise ValueError(
        f"{word!r} is not a failure to retry on; write {', '.join(CLASSES)}, fail, all, an exit code such as "
        "3, a range such as 10-20, or a signal such as SIGSEGV"
    )


def _exit_codes(word: str, low: int, high: int) -> str:
    if not 1 <= low <= high <= _HIGHEST_CODE:
        raise ValueError(f"{word!r} is not a range of failing exit codes; they go from 1 to {_HIGHEST_CODE}")
    return str(low) if low == high else f"{low}-{high}"


def backoff_s(rule: RetryRule, attempt: int, job_id: int) -> float:
    """Wait in seconds before the run that follows failure number `attempt` (from 1).

    `backoff_s x factor^(attempt-1)`, at most `backoff_max_s`, times a jitter between 0.75 and 1.25
    that depends only on job and attempt, so that jobs that failed together do not return together
    and a restarted daemon computes the same instant.
    """
    return _growth_s(rule, attempt) * (1 - _JITTER + 2 * _JITTER * _hash_fraction(f"{job_id}.{attempt}"))


def _growth_s(rule: RetryRule, attempt: int) -> float:
    if rule.backoff_s <= 0 or rule.backoff_factor <= 0:
        return max(0.0, min(rule.backoff_max_s, rule.backoff_s))
    # Compared as logarithms: the power itself overflows after some hundred attempts.
    exponent = (attempt - 1) * log(rule.backoff_factor)
    if rule.backoff_max_s <= 0 or exponent + log(rule.backoff_s) >= log(rule.backoff_max_s):
        return max(0.0, rule.backoff_max_s)
    return float(rule.backoff_s * rule.backoff_factor ** (attempt - 1))


def _hash_fraction(text: str) -> float:
    """Hash to a number in [0, 1), stable across processes and Python versions."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") / (1 << 64)


_STEP_MIB = 256
_SPARE = 1.25


@dataclass(frozen=True, slots=True)
class LargerRequest:
    """Retry with this request; `text` follows "with "."""

    request: Request
    text: str


@dataclass(frozen=True, slots=True)
class NothingLarger:
    """A retry would be futile; `text` says why."""

    text: str


def larger_request(
    request: Request, run: Run, nodes: Sequence[NodeView], settings: Settings, is_admitted: Callable[[Request], bool]
) -> LargerRequest | NothingLarger | None:
    """Enlarge a request whose run exceeded GPU memory, or its own limit of host memory.

    `is_admitted` says whether the machines could ever satisfy a request and the job's queue accepts it.

    Returns: None, to keep the request, when more would not help or that is unknown: growth is disabled, a card's
    size cannot be read, processes without a job held memory of one of the run's cards, or the whole machine ran out
    of memory.
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
            return LargerRequest(wish, f"{_words(wish, wish.min_vram_mib or 0)} instead of {before}")
    return NothingLarger(f"not retried: this cluster has no more GPU memory for it than {before}")


def _more_host_memory(
    request: Request, nodes: Sequence[NodeView], settings: Settings, is_admitted: Callable[[Request], bool]
) -> LargerRequest | NothingLarger | None:
    had_mib = request.mem_mib or settings.isolation.default_mem_mib
    if not had_mib:
        return None
    wanted_mib = max(had_mib * settings.life.oom_growth, had_mib + _STEP_MIB)
    most_mib = max((node.mem_mib for node in nodes), default=0)
    for mib in (-(-int(wanted_mib) // _STEP_MIB) * _STEP_MIB, most_mib):
        wish = on_each_node(request, mem_mib=mib)
        if mib > had_mib and is_admitted(wish):
            words = f"{format_size_mib(mib)} of host memory instead of {format_size_mib(had_mib)}"
            return LargerRequest(wish, words)
    return NothingLarger(f"not retried: this cluster has no more host memory for it than {format_size_mib(had_mib)}")


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
            yield replace(request, vram_mib=None, gpu_fraction=None, sm_percent=None, min_vram_mib=least_mib)


def _mib(share: GpuShare, view: GpuView) -> int:
    """Memory of a card that the run could use."""
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
