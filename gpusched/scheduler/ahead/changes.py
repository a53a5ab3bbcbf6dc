"""What one could change about a waiting job, one thing at a time; each change is tried before it is given."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from gpusched.model.job import Request
from gpusched.model.units import format_size_mib
from gpusched.model.value import replace
from gpusched.scheduler.ahead.trial import Change, Trial
from gpusched.scheduler.amounts import squeeze

STEP_S = 300
"""Time limits are proposed in these steps."""

TYPING_S = 60
"""A gap shrinks while somebody types: this much of it is not used."""

MAX_LIMIT_S = 7 * 86400
SHORTEST_S = 600
"""Of a job of which nothing is known, no shorter limit is proposed."""

UNKNOWN_LENGTH = "if that is long enough: too few jobs like it have ended to tell"
LEAST_SHARE = 0.5
"""Less than this part of the memory that was asked for is not proposed: the job would hardly run with it. Nor is less
of a time limit, where nothing else is known."""

_MAKERS = frozenset({"nvidia", "tesla", "geforce", "quadro", "amd", "radeon"})
_SERIES = frozenset({"rtx", "gtx", "titan"})

_FIELDS = {"gpus_linked": "is_linked", "exclusive": "is_exclusive"}
"""Names in a Request of fields of a submission that are called otherwise there."""

_LIMIT, _QUEUE, _CONDITION, _TYPE, _SLICE, _FEWER = 0.0, 0.9, 1.0, 1.5, 2.0, 2.5
"""How large a change is, before the part of the amount that it takes away is added."""


def limits(trial: Trial) -> Iterator[Change]:
    """A shorter time limit, to fit before what is kept for others: none that would end most jobs like it."""
    asked_s = trial.key.time_limit_s
    most_s = MAX_LIMIT_S if asked_s is None else asked_s - 1
    if trial.sensible is None:
        # Who says how long it takes knows best, within reason.
        least_s = SHORTEST_S if asked_s is None else max(SHORTEST_S, LEAST_SHARE * asked_s)
        remark = UNKNOWN_LENGTH
    else:
        least_s, remark = trial.sensible.least_s, trial.sensible.why
        most_s = min(most_s, int(trial.sensible.most_s))

    def of(limit_s: int) -> Change:
        part = 0.8 if asked_s is None else 1 - limit_s / asked_s
        typed = format_limit(limit_s)
        key = replace(trial.key, time_limit_s=limit_s)
        return Change(key, {"time_limit_s": limit_s}, f"-t {typed}", f"time={typed}", _LIMIT + part, remark=remark)

    for gap_s in trial.gaps_s:
        limit_s = _rounded(min(gap_s - TYPING_S, most_s))
        if limit_s and limit_s >= least_s and trial.helps(of(limit_s)):
            yield of(limit_s)
            return
    steps = range(STEP_S, int(most_s) + 1, STEP_S)
    found = _longest(trial, [of(step) for step in _geometric(steps) if step >= least_s])
    if found is not None:
        yield found


def _longest(trial: Trial, tries: list[Change]) -> Change | None:
    """The longest limit that helps with a minute to type it; the search knows no gaps."""
    best = trial.largest(tries)
    if best is None or best.key.time_limit_s is None:
        return best
    with_time_to_type = replace(best.key, time_limit_s=best.key.time_limit_s + TYPING_S)
    return best if trial.start_of(with_time_to_type) == trial.snapshot.now else _shorter(tries, best)


def _shorter(tries: list[Change], than: Change) -> Change | None:
    at = tries.index(than)
    return tries[at - 1] if at else None


def _geometric(steps: range) -> list[int]:
    """Steps of 5 minutes up to two hours, then of about a tenth: as people would ask."""
    chosen: list[int] = []
    for step in steps:
        unit = STEP_S if step <= 7200 else 1800 if step <= 43_200 else 3600 if step <= 86_400 else 6 * 3600
        if step % unit == 0:
            chosen.append(step)
    return chosen


def _rounded(limit_s: float) -> int:
    return 0 if limit_s in (inf, -inf) else max(0, int(limit_s // STEP_S) * STEP_S)


def format_limit(seconds: int) -> str:
    """A length of time the short way it is typed: `45m`, `2h`, `1h30m`, `2d`."""
    days, rest = divmod(seconds, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    parts = ((days, "d"), (hours, "h"), (minutes, "m"), (secs, "s"))
    return "".join(f"{number}{unit}" for number, unit in parts if number)


def queues(trial: Trial) -> Iterator[Change]:
    """Another queue."""
    parents = {queue.parent for queue in trial.settings.queue.values()}
    for name in sorted(trial.settings.queue):
        if name not in parents and name != trial.key.queue:
            one = Change(replace(trial.key, queue=name), {"queue": name}, f"-q {name}", f"queue={name}", _QUEUE)
            if trial.helps(one):
                yield one


def conditions(trial: Trial) -> Iterator[Change]:
    """Without one of the conditions on where it may run."""
    request = trial.key.request
    dropped: list[tuple[str, object, bool, str, str]] = [
        ("gpus_linked", False, request.is_linked, "--gpus-linked", "gpus-linked=no"),
        ("constraint", None, request.constraint is not None, f"-C '{request.constraint}'", "constraint="),
        ("nodelist", (), bool(request.nodelist), f"-w {','.join(request.nodelist)}", "nodelist="),
        ("exclude", (), bool(request.exclude), f"-x {','.join(request.exclude)}", "exclude="),
        ("exclusive", False, request.is_exclusive, "--exclusive", "exclusive=no"),
        (
            "min_vram_mib",
            None,
            request.min_vram_mib is not None,
            f"--min-vram {format_size_mib(request.min_vram_mib)}",
            "min-vram=",
        ),
    ]
    tries = [
        Change(trial.request(**{_FIELDS.get(name, name): value}), {name: value}, "", update, _CONDITION, without)
        for name, value, is_asked, without, update in dropped
        if is_asked
    ]
    name = trial.key.reservation
    if name is not None:
        key = replace(trial.key, reservation=None)
        tries.append(Change(key, {"reservation": None}, "", "reservation=", _CONDITION, f"--reservation {name}"))
    yield from filter(trial.helps, tries)


def types(trial: Trial) -> Iterator[Change]:
    """Another type of GPU, for a job that names one."""
    request = trial.key.request
    if request.gpu_type is None:
        return
    asked = squeeze(request.gpu_type)
    models = {gpu.name for node in trial.snapshot.nodes for gpu in node.gpus if asked not in squeeze(gpu.name)}
    names = sorted({_short_model(model) for model in models})
    for name in names[:4]:
        option, update = _gpus_words(request, gpu_type=name)
        one = Change(trial.request(gpu_type=name), {"gpu_type": name}, option, update, _TYPE)
        if trial.helps(one):
            yield one


def _gpus_words(request: Request, gpus: int | None = None, gpu_type: str | None = None) -> tuple[str, str]:
    """GPUs as typed for gsub and for gctl update; on several nodes those of each, as -g counts all of them."""
    count = f"{request.gpu_fraction:g}" if request.gpu_fraction is not None else str(gpus or request.gpus)
    kind = gpu_type or request.gpu_type
    typed = f"{kind}:{count}" if kind else count
    if request.nodes > 1:
        return f"--gpus-per-node {typed}", f"gpus-per-node={typed}"
    return f"-g {typed}", f"gpus={typed}"


def _short_model(model: str) -> str:
    """The word by which people call a card: `a100`, `rtx4090`."""
    words = [word for word in model.replace("-", " ").lower().split() if word not in _MAKERS]
    if len(words) > 1 and words[0] in _SERIES:
        return words[0] + words[1]
    return words[0] if words else squeeze(model)


def host(trial: Trial) -> Iterator[Change]:
    """Fewer cores, or less host memory."""
    request = trial.key.request
    cores = [
        Change(
            trial.request(cpus=float(cpus)),
            {"cpus": float(cpus)},
            f"-c {cpus}",
            f"cpus={cpus}",
            _LIMIT + 1 - cpus / request.cpus,
        )
        for cpus in range(1, int(-(-request.cpus // 1)))
    ]
    sizes = [
        Change(
            trial.request(mem_mib=mib),
            {"mem_mib": mib},
            f"-m {typed}",
            f"mem={typed}",
            _LIMIT + 1 - mib / request.mem_mib,
        )
        for mib, typed in _sizes(request.mem_mib)
    ]
    for tries in (cores, sizes):
        found = trial.largest(tries)
        if found is not None:
            yield found


def _sizes(asked_mib: int) -> list[tuple[int, str]]:
    """Amounts of memory below what was asked for, and how they are typed, smallest first."""
    unit = 1024 if asked_mib > 2048 else 256
    least = max(1, int(-(-asked_mib * LEAST_SHARE // unit)))
    sizes = [units * unit for units in range(least, -(-asked_mib // unit))]
    return [(mib, f"{mib // 1024}G" if mib % 1024 == 0 else f"{mib}M") for mib in sizes]


def slices(trial: Trial) -> Iterator[Change]:
    """A slice of a card in place of a whole one, or a smaller slice."""
    request = trial.key.request
    if request.vram_mib is not None:
        sizes = _sizes(request.vram_mib)
        asked_mib = request.vram_mib
    elif request.gpus == 1 and request.gpu_fraction is None and request.nodes == 1 and not request.is_exclusive:
        cards = [gpu.vram_total_mib for node in trial.snapshot.nodes for gpu in node.gpus if gpu.vram_total_mib]
        asked_mib = min(cards, default=0)
        least_mib = request.min_vram_mib or 0
        sizes = [size for size in _sizes(asked_mib) if size[0] >= least_mib]
    else:
        return
    found = trial.largest(
        [
            Change(
                trial.request(vram_mib=mib),
                {"vram_mib": mib},
                f"--vram {typed}",
                f"vram={typed}",
                _SLICE + 1 - mib / asked_mib,
            )
            for mib, typed in sizes
        ]
    )
    if found is not None:
        yield found


def fewer(trial: Trial) -> Iterator[Change]:
    """Fewer nodes, or fewer GPUs on each."""
    request = trial.key.request
    each = f" {_gpus_words(request)[0]}" if request.gpus else ""
    nodes = [
        Change(
            trial.request(nodes=count),
            {"nodes": count},
            f"-N {count}{each}",
            f"nodes={count}",
            _FEWER + 1 - count / request.nodes,
        )
        for count in range(1, request.nodes)
    ]
    field = "gpus_per_node" if request.nodes > 1 else "gpus"
    cards = [
        Change(
            trial.request(gpus=count), {field: count}, *_gpus_words(request, count), _FEWER + 1 - count / request.gpus
        )
        for count in range(1, request.gpus)
    ]
    for tries in (nodes, cards):
        found = trial.largest(tries)
        if found is not None:
            yield found
