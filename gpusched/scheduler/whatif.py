"""Changes to a pending job that would start it now: `decide` verifies every answer.

Changes one thing at a time, and proposes nothing that would not be admitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from gpusched.model.cluster import GpuView
from gpusched.model.job import Request
from gpusched.model.settings import GpuSettings, Settings
from gpusched.model.snapshot import ClassKey, PendingJob, Placement, Snapshot, VramSeen
from gpusched.model.units import about, format_size_mib
from gpusched.model.value import replace
from gpusched.scheduler.events import JobLeft, JobQueued
from gpusched.scheduler.planner import Planner, decide
from gpusched.scheduler.plugins import NO_EXTENSIONS, Extensions
from gpusched.scheduler.request_units import squeeze

STEP_S = 300
"""Granularity of proposed time limits."""

TYPING_S = 60
"""Part of a gap left unused, since it shrinks while the user types."""

MAX_LIMIT_S = 7 * 86400
SHORTEST_S = 600
"""Minimum limit to propose for a job without history."""

UNKNOWN_LENGTH = "if that is long enough: too few jobs like it have ended to tell"
LEAST_SHARE = 0.5
"""Minimum fraction of the requested memory to propose: the job would hardly run with less. Likewise for a time
limit without other evidence."""

_MAKERS = frozenset({"nvidia", "tesla", "geforce", "quadro", "amd", "radeon"})
_SERIES = frozenset({"rtx", "gtx", "titan"})

_FIELDS = {"gpus_linked": "is_linked", "exclusive": "is_exclusive"}
"""Fields of a Request with another name in a submission."""

_LIMIT, _QUEUE, _CONDITION, _TYPE, _SLICE, _FEWER = 0.0, 0.9, 1.0, 1.5, 2.0, 2.5
"""Size of a change, before adding the fraction of the amount that it takes away."""


def shorter_limits(trial: Trial) -> Iterator[Change]:
    """Shorter time limits that fit before others' reservations, but not so short as to end most similar jobs."""
    asked_s = trial.key.time_limit_s
    most_s = MAX_LIMIT_S if asked_s is None else asked_s - 1
    if trial.sensible is None:
        # The user's own limit is the best estimate, within reason.
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
    """The longest limit that helps, with a minute to type it; the search does not know the gaps."""
    best = trial.largest(tries)
    if best is None or best.key.time_limit_s is None:
        return best
    with_time_to_type = replace(best.key, time_limit_s=best.key.time_limit_s + TYPING_S)
    return best if trial.start_of(with_time_to_type) == trial.snapshot.now else _shorter(tries, best)


def _shorter(tries: list[Change], than: Change) -> Change | None:
    at = tries.index(than)
    return tries[at - 1] if at else None


def _geometric(steps: range) -> list[int]:
    """Steps of 5 minutes up to two hours, then of about a tenth: as users would ask."""
    chosen: list[int] = []
    for step in steps:
        unit = STEP_S if step <= 7200 else 1800 if step <= 43_200 else 3600 if step <= 86_400 else 6 * 3600
        if step % unit == 0:
            chosen.append(step)
    return chosen


def _rounded(limit_s: float) -> int:
    return 0 if limit_s in (inf, -inf) else max(0, int(limit_s // STEP_S) * STEP_S)


def format_limit(seconds: int) -> str:
    """A duration in the short form in which it is typed: `45m`, `2h`, `1h30m`, `2d`."""
    days, rest = divmod(seconds, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    parts = ((days, "d"), (hours, "h"), (minutes, "m"), (secs, "s"))
    return "".join(f"{number}{unit}" for number, unit in parts if number)


def other_queues(trial: Trial) -> Iterator[Change]:
    parents = {queue.parent for queue in trial.settings.queue.values()}
    for name in sorted(trial.settings.queue):
        if name not in parents and name != trial.key.terms.queue:
            one = Change(trial.key.with_terms(queue=name), {"queue": name}, f"-q {name}", f"queue={name}", _QUEUE)
            if trial.helps(one):
                yield one


def dropped_conditions(trial: Trial) -> Iterator[Change]:
    """Omissions of one condition on where the job may run."""
    request = trial.key.terms.request
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
    name = trial.key.terms.reservation
    if name is not None:
        key = trial.key.with_terms(reservation=None)
        tries.append(Change(key, {"reservation": None}, "", "reservation=", _CONDITION, f"--reservation {name}"))
    yield from filter(trial.helps, tries)


def other_gpu_types(trial: Trial) -> Iterator[Change]:
    """Other types of GPU, for a job that names one."""
    request = trial.key.terms.request
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
    """GPU options for gsub and for gctl update; on several nodes the number per node, as -g counts all of them."""
    total = request.gpus if request.bundles is None else request.total_gpus
    count = f"{request.gpu_fraction:g}" if request.gpu_fraction is not None else str(gpus or total)
    kind = gpu_type or request.gpu_type
    typed = f"{kind}:{count}" if kind else count
    if request.nodes > 1 and request.bundles is None:
        return f"--gpus-per-node {typed}", f"gpus-per-node={typed}"
    return f"-g {typed}", f"gpus={typed}"


def _short_model(model: str) -> str:
    """Common name of a card: `a100`, `rtx4090`."""
    words = [word for word in model.replace("-", " ").lower().split() if word not in _MAKERS]
    if len(words) > 1 and words[0] in _SERIES:
        return words[0] + words[1]
    return words[0] if words else squeeze(model)


def less_host(trial: Trial) -> Iterator[Change]:
    request = trial.key.terms.request
    if request.bundles is not None:
        return
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
    """Memory sizes below the requested one, and how they are typed, smallest first."""
    unit = 1024 if asked_mib > 2048 else 256
    least = max(1, int(-(-asked_mib * LEAST_SHARE // unit)))
    sizes = [units * unit for units in range(least, -(-asked_mib // unit))]
    return [(mib, f"{mib // 1024}G" if mib % 1024 == 0 else f"{mib}M") for mib in sizes]


def smaller_slices(trial: Trial) -> Iterator[Change]:
    """A slice of a card instead of a whole one, or a smaller slice."""
    request = trial.key.terms.request
    if request.vram_mib is not None:
        sizes = _sizes(request.vram_mib)
        asked_mib = request.vram_mib
    elif request.gpus == 1 and not request.shares_cards and request.nodes == 1 and not request.is_exclusive:
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


def other_layouts(trial: Trial) -> Iterator[Change]:
    """More nodes for a job in bundles, or fewer GPUs over those it asks for."""
    request = trial.key.terms.request
    bundles = request.bundles
    if bundles is None:
        return
    nodes_max = min(len(trial.snapshot.nodes), bundles.count)
    if nodes_max > bundles.nodes_max:
        wider = trial.request(bundles=replace(bundles, nodes_max=nodes_max))
        words = f"{request.nodes}-{nodes_max}"
        one = Change(
            wider, {"nodes": request.nodes, "nodes_max": nodes_max}, f"-N {words}", f"nodes={words}", _CONDITION
        )
        if trial.helps(one):
            yield one
    if not bundles.gpus or bundles.tasks:
        return
    found = trial.largest(
        [
            Change(
                trial.request(bundles=replace(bundles, count=count, most=count - request.nodes + 1)),
                {"gpus": count},
                *_gpus_words(request, count),
                _FEWER + 1 - count / bundles.count,
            )
            for count in range(request.nodes + 1, bundles.count)
        ]
    )
    if found is not None:
        yield found


def fewer_gpus(trial: Trial) -> Iterator[Change]:
    request = trial.key.terms.request
    if request.bundles is not None:
        return
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


BUDGET = 25
"""Maximum number of plans for one question, besides that of the present."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change worth trying."""

    key: ClassKey
    change: Mapping[str, object]
    option: str
    update: str
    size: float
    without: str = ""
    """What to leave out, if the change is not an option to type."""
    remark: str = ""
    """Argument for it, or caveat."""


@dataclass(frozen=True, slots=True)
class SensibleLimit:
    """Sensible time limits for a job, from similar ones, in seconds."""

    least_s: float
    """Nearly all of them took no longer."""
    most_s: float
    """A longer one is no safer."""
    why: str
    """`95 % of 34 jobs like it took at most 1:40:00`."""


@dataclass(slots=True)
class Trial:
    """Trials of changes to one job, within the budget."""

    snapshot: Snapshot
    settings: Settings
    key: ClassKey
    job: PendingJob
    allowed: Callable[[ClassKey], bool]
    planner: Planner
    """Loaded with the snapshot, without the job."""
    kept: Placement | None = None
    """Its last reserved place, while it is fenced."""
    left: int = BUDGET + 1
    known: dict[ClassKey, float | None] = field(default_factory=dict)
    later: list[tuple[Change, float]] = field(default_factory=list)
    gaps_s: tuple[float, ...] = ()
    """How long gaps before reservations and calendar windows last, longest first."""
    sensible: SensibleLimit | None = None
    """None if too few similar jobs have ended."""

    @classmethod
    def of(
        cls,
        snapshot: Snapshot,
        settings: Settings,
        job_id: int,
        allowed: Callable[[ClassKey], bool],
        extensions: Extensions = NO_EXTENSIONS,
        sensible: SensibleLimit | None = None,
        planner: Planner | None = None,
    ) -> Trial | None:
        """None if the job is not in the snapshot. Args: planner: loaded with the snapshot, and left as it is."""
        for waiting in snapshot.pending:
            job = next((one for one in waiting.jobs if one.id == job_id), None)
            if job is not None:
                own = Planner.from_snapshot(snapshot, settings, extensions) if planner is None else planner.fork()
                kept = own.state.kept.get(job_id)
                own.state.apply(JobLeft(job_id))
                return cls(snapshot, settings, waiting.key, job, allowed, own, kept, sensible=sensible)
        return None

    def start_of(self, key: ClassKey) -> float | None:
        """Start of the job with this key, as far as one plan determines it. None also once the budget is used up."""
        if key in self.known:
            return self.known[key]
        if self.left <= 0:
            return None
        self.left -= 1
        self.planner.state.apply(JobQueued(key, self.job))
        if self.kept is not None:
            self.planner.state.kept[self.job.id] = self.kept
        plan = self.planner.plan(self.snapshot.now)
        # Cheaper than a fork of the planner for each trial.
        self.planner.state.apply(JobLeft(self.job.id))
        found: float | None = None
        if any(start.job_id == self.job.id for start in plan.starts):
            found = self.snapshot.now
        else:
            kept = [one.start_at for one in plan.reservations if one.job_id == self.job.id]
            # An immediate expected start is not real: something that should be over still blocks it.
            found = next((at for at in kept if at is not None and at > self.snapshot.now), None)
        if key == self.key:
            others = [one.start_at for one in plan.reservations if one.start_at is not None]
            self.gaps_s = tuple(
                sorted({at - self.snapshot.now for at in (*others, *self._of_calendar())}, reverse=True)
            )
        self.known[key] = found
        return found

    def _of_calendar(self) -> Iterator[float]:
        """Instants by which the job must have ended because of the calendar."""
        for window in self.snapshot.windows:
            if window.start_at > self.snapshot.now:
                yield window.start_at
            elif window.name == self.key.terms.reservation:
                yield window.end_at

    def helps(self, one: Change) -> bool:
        """Whether the job starts now with this change; remembers one that only makes it start sooner."""
        if one.key == self.key or one.key.terms.request.contradiction() is not None or not self.allowed(one.key):
            return False
        start_at = self.start_of(one.key)
        if start_at is not None and start_at > self.snapshot.now:
            self.later.append((one, start_at))
        return start_at == self.snapshot.now

    def largest(self, tries: Sequence[Change]) -> Change | None:
        """The last of these changes, smallest amount first, that helps; more is never easier than less."""
        if not tries or not self.helps(tries[0]):
            return None
        low, high = 0, len(tries)
        while high - low > 1 and self.left > 0:
            middle = (low + high) // 2
            if self.helps(tries[middle]):
                low = middle
            else:
                high = middle
        return tries[low]

    def request(self, **parts: object) -> ClassKey:
        return self.key.with_terms(request=replace(self.key.terms.request, **parts))  # type: ignore[arg-type]


SOONER_S = 600.0
"""A change that does not start the job now is proposed only if it gains this much, and half of the wait."""

_CHANGES = (
    shorter_limits,
    other_queues,
    dropped_conditions,
    other_gpu_types,
    less_host,
    smaller_slices,
    fewer_gpus,
    other_layouts,
)


@dataclass(frozen=True, slots=True)
class Alternative:
    """A change, tried on the present state of the machines and the queue."""

    change: Mapping[str, object]
    """Fields of the submission and their new values."""
    text: str
    """Its effect: "would start now with -t 2h"."""
    option: str
    """As typed for gsub; empty if something has to be left out."""
    update: str
    """As typed for `gctl update ID`; empty if gctl has no option for it."""
    starts_at: float
    """The present, or the promised start."""
    is_now: bool


def alternatives(
    snapshot: Snapshot,
    settings: Settings,
    job_id: int,
    allowed: Callable[[ClassKey], bool] = lambda key: True,
    extensions: Extensions = NO_EXTENSIONS,
    sensible: SensibleLimit | None = None,
    planner: Planner | None = None,
) -> tuple[Alternative, ...]:
    """Changes that start a pending job now, or clearly sooner, smallest first.

    `allowed` says whether a job with this key would be admitted, `sensible` which time limits similar jobs keep. Empty
    if the job is not in the snapshot, if it starts anyway, and if no tried change helps. A `planner` loaded with the
    snapshot saves loading one, and is left as it is.
    """
    trial = Trial.of(snapshot, settings, job_id, allowed, extensions, sensible, planner)
    if trial is None or trial.start_of(trial.key) == snapshot.now:
        return ()
    found = [one for change in _CHANGES for one in change(trial)]
    sooner = _sooner(trial)
    made = [(one.size, _worded(one, snapshot.now, None)) for one in found]
    if not made and sooner is not None:
        one, start_at = sooner
        made = [(one.size, _worded(one, snapshot.now, start_at))]
    return tuple(one for _, one in sorted(made, key=lambda pair: (pair[0], pair[1].text)))


def _worded(one: Change, now: float, start_at: float | None) -> Alternative:
    how = f"without {one.without}" if one.without else f"with {one.option}"
    when = "now" if start_at is None else f"in {about(start_at - now)}"
    at = now if start_at is None else start_at
    remark = f" ({one.remark})" if one.remark else ""
    return Alternative(one.change, f"would start {when} {how}{remark}", one.option, one.update, at, start_at is None)


def _sooner(trial: Trial) -> tuple[Change, float] | None:
    """The change that gains most, if that is clearly worth it."""
    before = trial.known.get(trial.key)
    if before is None or not trial.later:
        return None
    one, start_at = min(trial.later, key=lambda pair: (pair[1], pair[0].size))
    wait_s = before - trial.snapshot.now
    return (one, start_at) if before - start_at >= max(SOONER_S, wait_s / 2) else None


Left = Mapping[str, int]
"""By GPU UUID: memory in MiB left in use there that belongs to no job."""


def starts_without(
    snapshot: Snapshot, settings: Settings, cases: Sequence[Left], extensions: Extensions = NO_EXTENSIONS
) -> tuple[int, ...]:
    """How many more jobs would start now, for each case by itself, verified by `decide`."""
    before = len(decide(snapshot, settings, extensions).starts)
    return tuple(max(0, len(decide(_without(snapshot, left), settings, extensions).starts) - before) for left in cases)


def starts_on(
    snapshot: Snapshot, settings: Settings, left: Left, extensions: Extensions = NO_EXTENSIONS
) -> Mapping[str, tuple[int, ...]]:
    """Jobs that would start now in addition to those that start anyway, by the GPUs they would get."""
    before = {start.job_id for start in decide(snapshot, settings, extensions).starts}
    found: dict[str, tuple[int, ...]] = {}
    for start in decide(_without(snapshot, left), settings, extensions).starts:
        if start.job_id in before:
            continue
        for piece in (start.placement, *start.placement.others):
            for share in piece.gpus:
                found[share.uuid] = (*found.get(share.uuid, ()), start.job_id)
    return found


def _closes(gpu: GpuView, left_mib: int) -> bool:
    """Whether this much foreign memory would still keep whole-card jobs away."""
    return left_mib > gpu.foreign_limit_mib or (gpu.is_foreign_busy and left_mib > 0)


def _without(snapshot: Snapshot, left: Left) -> Snapshot:
    nodes = []
    for node in snapshot.nodes:
        gpus = tuple(
            replace(
                gpu,
                foreign_mib=left[gpu.uuid],
                why_not_whole=gpu.why_not_whole if _closes(gpu, left[gpu.uuid]) else None,
            )
            if gpu.uuid in left
            else gpu
            for gpu in node.gpus
        )
        nodes.append(replace(node, gpus=gpus))
    return replace(snapshot, nodes=tuple(nodes))


_SPARE = 1.25
_STEP_MIB = 1024


def vram_seen(request: Request, found: VramSeen) -> str:
    """`its last 5 runs peaked at 6.1G`."""
    each = " on each GPU" if request.gpus > 1 else ""
    return f"its last {found.runs} runs peaked at {format_size_mib(found.peak_mib)} of VRAM{each}"


def vram_advice(request: Request, found: VramSeen, cards: Sequence[GpuView], settings: GpuSettings) -> str | None:
    """What to request instead; None if the request is about right, or there is no evidence.

    Args: cards: of all nodes.
    """
    wanted_mib = max(_STEP_MIB, -(-int(found.peak_mib * _SPARE) // _STEP_MIB) * _STEP_MIB)
    wanted = f"--vram {format_size_mib(wanted_mib)}"
    if request.vram_mib is not None:
        if found.peak_mib > request.vram_mib + settings.vram_over_mib:
            return f"that is more than the {format_size_mib(request.vram_mib)} it books: ask for {wanted}"
        return f"{wanted} would do" if 2 * wanted_mib <= request.vram_mib else None
    if request.gpus != 1 or request.card_fraction is not None:
        return None
    model = squeeze(request.gpu_type or "")
    sizes_mib = [
        card.vram_total_mib
        for card in cards
        if card.is_present and card.can_share and card.vram_total_mib and model in squeeze(card.name)
    ]
    sizes_mib = [mib for mib in sizes_mib if mib >= (request.min_vram_mib or 0)]
    if sizes_mib and 2 * (wanted_mib + settings.share_headroom_mib) <= min(sizes_mib):
        return f"{wanted} would do, and shares a card with others of yours"
    return None
