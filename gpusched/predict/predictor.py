"""Predicts run times from jobs that have ended, and corrects what users state.

`RunTimes` keeps the newest run times by key. A job has a chain of keys, from narrow (same user, limit and size) to wide
(same user). A guess is two numbers, because planning and ordering need different ones:

    plan_s      planned run time: the mean of the last two similar jobs
    expected_s  used for ordering: long runs count by their mean, short ones by what waiting costs them

Without a limit, run times differ by powers of ten. Jobs are then ordered by the mean of the newest similar runs and
planned with the length that three in five of those kept to.

With a limit, expected_s is the geometric mean of the arithmetic and the harmonic mean. If jobs cannot be interrupted,
running those with the smallest E[s] / E[1/s] first minimises the mean of wait / s (weighted shortest expected
processing time, with weight 1/s); E[s] / E[1/s] is the square of that number. Each run counts twice what the one before
it does; the runs of one key are mixed with those of wider keys and finally with the limit, each weighing as one run.

`PredictionJudge` compares guesses with the limits that users state, by the mean of |log(stated / actual)| over the
newest runs: 0 if all were right, log 2 if they were off by a factor of two on average, in either direction. The actual
length of a run that was ended at its limit is that limit. Each user is judged by their own runs; a user with few runs,
by those of all users.

`Overruns` learns from limits that were too short. A run ended at its limit is censored: all we know is that it needs
longer. The maximum-likelihood estimate of the mean, for runs that end at a constant rate, is

    run times of all / number that ended by themselves

While none has ended by itself, the limit of the job in question counts as one such run. A job submitted with a limit of
10 minutes, ended, and submitted again with 10 minutes is therefore expected to take 20, then 30, up to `RUNS_KEPT`
times its limit, until one ends by itself. A limit `BELIEVED` times as long as the runs that were cut short is new
information; those no longer count against it. A command without runs is judged by the other runs of its user, in
multiples of their limits, if more of these were cut than ended by themselves: renaming a script changes nothing.

Sources: Tsafrir, Etsion and Feitelson, Backfilling Using System-Generated Predictions Rather than User Runtime
Estimates (2007), for the last two; Rothkopf, Scheduling with Random Service Times (1966), for the order; Epstein and
Sobel, Life Testing (1953), for overruns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from math import exp, inf, log, sqrt

from gpusched.model.value import Value

RUN_TIMES_KEPT = 50
"""Run times kept per key: enough for a mean that a few long runs dominate."""

_MIXED = 8
"""Newest runs that are mixed; older ones would count next to nothing."""

_USUAL = 0.6
"""Fraction of runs that keep to the length a job without a limit is planned with."""

MOST_KEYS = 20000
"""Beyond this, the keys least recently updated are dropped."""

SHORT_S = 10.0
"""Shorter runs count as this long, as in the bounded slowdown."""

_HALVES = 0.5
"""Weight of a run relative to the next newer one."""

_WIDER = 1.0
"""Weight of all wider keys together, in runs."""

_STEP = 1.1
_LOG_OF_STEP = log(_STEP)

FamilyKeys = Sequence[Hashable]
"""Narrowest first."""


class RunTimeGuess(Value):
    """Run time of one job in whole seconds, rounded in steps of 10 % so that similar jobs stay in one class."""

    plan_s: int
    expected_s: int


class RunTimes:
    """The newest run times in seconds, by key."""

    def __init__(self) -> None:
        self._run_times_s: dict[Hashable, tuple[float, ...]] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._run_times_s

    def learn(self, keys: FamilyKeys, run_s: float) -> None:
        """A job with these keys has ended."""
        known = self._run_times_s
        for key in keys:
            known[key] = (*known.pop(key, ()), run_s)[-RUN_TIMES_KEPT:]
        while len(known) > MOST_KEYS:
            del known[next(iter(known))]

    def learn_older(self, keys: FamilyKeys, run_times_s: Sequence[float]) -> None:
        """Adds runs that ended before every run known under these keys, oldest first."""
        for key in keys:
            self._run_times_s[key] = (*run_times_s, *self._run_times_s.get(key, ()))[-RUN_TIMES_KEPT:]

    def by_key(self) -> Mapping[Hashable, tuple[float, ...]]:
        """All run times, oldest first."""
        return self._run_times_s

    def known(self, keys: FamilyKeys) -> list[tuple[float, ...]]:
        """The newest run times of each key that has any, oldest first."""
        return [found for key in keys if (found := self._run_times_s.get(key))]

    def closest(self, keys: FamilyKeys) -> tuple[float, ...]:
        """The newest run times of the first key that has any, oldest first."""
        return next((found for key in keys if (found := self._run_times_s.get(key))), ())


Method = Callable[[RunTimes, FamilyKeys, int | None], RunTimeGuess | None]
"""Guesses for a job with these keys and this limit in seconds (None: no limit); None if nothing is known."""


def by_last_two(past: RunTimes, keys: FamilyKeys, limit_s: int | None) -> RunTimeGuess | None:
    """The mean of the last two under the narrowest key that has any; at most the limit."""
    last = past.closest(keys)[-2:]
    if not last:
        return None if limit_s is None else RunTimeGuess(limit_s, limit_s)
    guess_s = in_steps(sum(last) / len(last), limit_s)
    return RunTimeGuess(guess_s, guess_s)


def by_last_two_of_user(past: RunTimes, keys: FamilyKeys, limit_s: int | None) -> RunTimeGuess | None:
    """The mean of the last two under the widest key."""
    return by_last_two(past, keys[-1:], limit_s)


def by_all_alike(past: RunTimes, keys: FamilyKeys, limit_s: int | None) -> RunTimeGuess | None:
    """Planned as the last two of any size; ordered by a mixture of all similar runs."""
    plan = by_last_two(past, keys[1:] or keys, limit_s)
    if plan is None:
        return None
    newest = [run_times_s[-_MIXED:] for run_times_s in past.known(keys)]
    return RunTimeGuess(plan.plan_s, in_steps(_mixed_s(newest, limit_s), limit_s))


def by_mean(past: RunTimes, keys: FamilyKeys, limit_s: int | None) -> RunTimeGuess | None:
    """Ordered by the mean under the narrowest key that has any; planned with what three in five of those kept to."""
    known = past.closest(keys)
    if not known:
        return None if limit_s is None else RunTimeGuess(limit_s, limit_s)
    ordered = sorted(known)
    usual_s = ordered[min(len(ordered) - 1, int(_USUAL * len(ordered)))]
    return RunTimeGuess(in_steps(usual_s, limit_s), in_steps(sum(ordered) / len(ordered), limit_s))


METHODS: Mapping[str, Method] = {
    "last2": by_last_two_of_user,
    "similar": by_last_two,
    "mixed": by_all_alike,
    "mean": by_mean,
}
"""By the name used on the command line."""


def _mixed_s(known: Sequence[Sequence[float]], limit_s: int | None) -> float:
    left, mean_s, inverse = 1.0, 0.0, 0.0
    most_s = inf if limit_s is None else limit_s
    for number, run_times_s in enumerate(known):
        weights, total = _WEIGHTS[len(run_times_s)]
        is_last = limit_s is None and number == len(known) - 1
        part = left if is_last else left * total / (total + _WIDER)
        sum_s = of_inverses = 0.0
        for weight, run_s in zip(weights, run_times_s, strict=True):
            bounded_s = max(SHORT_S, min(run_s, most_s))
            sum_s += weight * bounded_s
            of_inverses += weight / bounded_s
        share = part / total
        mean_s += share * sum_s
        inverse += share * of_inverses
        left -= part
    if limit_s is not None:
        mean_s += left * limit_s
        inverse += left / max(SHORT_S, limit_s)
    return sqrt(mean_s / inverse)


def _weights(count: int) -> tuple[tuple[float, ...], float]:
    """The weight of each run, oldest first, and their sum."""
    weights = tuple(_HALVES**age for age in reversed(range(count)))
    return weights, sum(weights)


_WEIGHTS = tuple(map(_weights, range(_MIXED + 1)))


def in_steps(length_s: float, limit_s: int | None) -> int:
    """Whole seconds, rounded to a power of 1.1; at least 1, at most the limit."""
    rounded = max(1, round(_STEP ** round(log(max(1.0, length_s)) / _LOG_OF_STEP)))
    return rounded if limit_s is None else min(rounded, limit_s)


RUNS_KEPT = 50
"""Newest runs that count, per family and per user."""

MOST_FAMILIES = 5000
"""Beyond this, the families (or users) least recently active are dropped."""

BELIEVED = 2
"""A limit this many times as long as a run that was cut short is believed."""


class EndedRun(Value):
    """A run that has ended; `is_cut`: at its time limit, with no checkpoint to resume from."""

    run_s: float
    limit_s: int | None
    is_cut: bool

    @property
    def multiple(self) -> float:
        """Run time as a multiple of its limit."""
        return self.run_s / self.limit_s if self.limit_s else 0.0


class _Newest:
    """Runs of a family or user, oldest first, with a running count of those cut at their limits."""

    __slots__ = ("cuts", "runs")

    def __init__(self, runs: Iterable[EndedRun] = ()) -> None:
        self.runs = deque(runs, RUNS_KEPT)
        self.cuts = sum(one.is_cut for one in self.runs)

    def add(self, ended: EndedRun) -> None:
        if len(self.runs) == RUNS_KEPT:
            self.cuts -= self.runs[0].is_cut
        self.runs.append(ended)
        self.cuts += ended.is_cut


_NONE = _Newest()


class Overruns:
    """The newest ended runs of each family and user."""

    def __init__(self) -> None:
        self._families: dict[Hashable, _Newest] = {}
        self._users: dict[Hashable, _Newest] = {}

    def learn(self, kind: Hashable, user: str, ended: EndedRun) -> None:
        """A run has ended by itself or was ended at its limit."""
        for known, key in ((self._families, kind), (self._users, user)):
            if known is self._users and ended.limit_s is None:
                continue
            # Moved to the end: the least recently active is dropped first.
            known[key] = newest = known.pop(key, None) or _Newest()
            newest.add(ended)
            if len(known) > MOST_FAMILIES:
                del known[next(iter(known))]

    def learn_older(self, ended: Iterable[tuple[Hashable, str, EndedRun]]) -> None:
        """Adds runs that ended before every known one, oldest first: family, user, run."""
        families: dict[Hashable, list[EndedRun]] = {}
        users: dict[str, list[EndedRun]] = {}
        for kind, user, one in ended:
            families.setdefault(kind, []).append(one)
            if one.limit_s is not None:
                users.setdefault(user, []).append(one)
        for kind, older in families.items():
            self._families[kind] = _Newest((*older, *self._families.get(kind, _NONE).runs))
        for user, older in users.items():
            self._users[user] = _Newest((*older, *self._users.get(user, _NONE).runs))

    def ended(self, kind: Hashable) -> tuple[EndedRun, ...]:
        """The newest runs of a family, oldest first."""
        return tuple(self._families.get(kind, _NONE).runs)

    def count(self, kind: Hashable, user: str, limit_s: int) -> int:
        """How many of the newest runs, of the family or else of the user, were cut and speak against this limit."""
        return sum(one.is_cut for one in self._against(kind, user, limit_s))

    def least_s(self, kind: Hashable, user: str, limit_s: int) -> int | None:
        """Expected length of a job with this limit, at least; None if nothing speaks against its limit."""
        known = self._against(kind, user, limit_s)
        if not known:
            return None
        ended = sum(not one.is_cut for one in known)
        if kind in self._families:
            total_s = sum(one.run_s for one in known)
        else:
            total_s = limit_s * sum((one.multiple for one in known), 0.0)
        return in_steps(total_s / ended if ended else total_s + limit_s, None)

    def _against(self, kind: Hashable, user: str, limit_s: int) -> list[EndedRun]:
        """The runs that count for such a job; none unless one of them speaks against its limit."""
        family = self._families.get(kind)
        if family is None:
            theirs = self._users.get(user, _NONE)
            return list(theirs.runs) if 2 * theirs.cuts > len(theirs.runs) else []
        if not family.cuts:
            return []
        known = [one for one in family.runs if not one.is_cut or limit_s < BELIEVED * one.run_s]
        return known if any(one.is_cut for one in known) else []


class ExpectedRunTime(Value):
    """How long a pending job is expected to run, and the basis for it."""

    length_s: int | None
    """None: unknown."""
    by: str
    """`limit`, `prediction`, `overruns` (similar runs that were cut at their limits) or `unknown`."""
    overruns: int = 0
    """Number of such runs."""


def at_least(guess: RunTimeGuess | None, limit_s: int, least_s: int | None) -> RunTimeGuess | None:
    """The guess to use if a job is expected to take at least `least_s`; None: its limit. `plan_s` stays."""
    if least_s is None or least_s <= (limit_s if guess is None else guess.expected_s):
        return guess
    return RunTimeGuess(limit_s if guess is None else guess.plan_s, least_s)


JUDGED_RUNS = 500
"""Newest runs of all users that count."""

JUDGED_RUNS_OF_USER = 100
"""Newest runs of one user that count."""

MOST_USERS = 1000
"""Beyond this, the users least recently active are dropped and judged by all users' runs."""

LEAST_JUDGED = 20
"""With fewer runs of a user, those of all users decide; with fewer of all users, limits are used."""

_SHORTEST_S = 1.0

_UNITS = 1 << 40
"""Units of error per 1.0: sums of whole numbers lose no digit."""


class JudgedRun(Value):
    """What was predicted and stated for a run, and its length, in seconds."""

    guess_s: float
    limit_s: float
    run_s: float


class PredictionError(Value):
    """How far off guesses and limits have been: 1 is right, 2 off by a factor of two on average."""

    runs: int
    guess_factor: float
    limit_factor: float
    is_own: bool = False
    """True: runs of the user asked for; False: of all users."""

    @property
    def is_better(self) -> bool:
        """Whether to use guesses."""
        return self.runs >= LEAST_JUDGED and self.guess_factor < self.limit_factor


class PredictionJudge:
    """Keeps the errors of guesses and limits of the newest runs. Must be given every run that ends."""

    def __init__(self) -> None:
        self._all_users = _Errors(JUDGED_RUNS)
        self._users: dict[str, _Errors] = {}
        """Least recently active first."""

    def is_better(self, user: str) -> bool:
        """Whether to use guesses for jobs of this user that have a limit."""
        return self._of(user).is_better

    def measure(self, user: str | None = None) -> PredictionError:
        """The errors for jobs of this user; None: of all users."""
        found = self._all_users if user is None else self._of(user)
        return found.measure(is_own=found is not self._all_users)

    def add(self, user: str, *ended: JudgedRun) -> bool:
        """Adds runs of a user that have just ended, oldest first. Returns: whether `is_better` has changed."""
        before = self.is_better(user)
        known = self._users.pop(user, None)
        self._users[user] = own = known or _Errors(JUDGED_RUNS_OF_USER)
        for one in ended:
            errors = _errors(one)
            own.add(errors)
            self._all_users.add(errors)
        while len(self._users) > MOST_USERS:
            del self._users[next(iter(self._users))]
        return self.is_better(user) is not before

    def add_older(self, ended: Iterable[tuple[str, JudgedRun]]) -> None:
        """Adds runs that ended before every known one, oldest first, each with its user."""
        for user, one in reversed(tuple(ended)):
            own = self._users.get(user)
            if own is None and len(self._users) < MOST_USERS:
                # The least recently active of all.
                self._users = {user: (own := _Errors(JUDGED_RUNS_OF_USER)), **self._users}
            missing = [errors for errors in (own, self._all_users) if errors is not None and errors.has_room]
            if missing:
                found = _errors(one)
                for errors in missing:
                    errors.add_older(found)

    def _of(self, user: str) -> _Errors:
        own = self._users.get(user)
        return self._all_users if own is None or len(own) < LEAST_JUDGED else own


class _Errors:
    """Errors of guess and limit of the newest runs, as whole numbers.

    Invariant: the sums are those of the errors kept.
    """

    __slots__ = ("_guesses", "_kept", "_limits", "_most")

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: deque[tuple[int, int]] = deque()
        """(guess, limit), oldest first."""
        self._guesses = self._limits = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def has_room(self) -> bool:
        return len(self._kept) < self._most

    @property
    def is_better(self) -> bool:
        return len(self._kept) >= LEAST_JUDGED and self._guesses < self._limits

    def measure(self, *, is_own: bool) -> PredictionError:
        units = max(1, len(self._kept)) * _UNITS
        return PredictionError(len(self._kept), exp(self._guesses / units), exp(self._limits / units), is_own)

    def add(self, errors: tuple[int, int]) -> None:
        self._kept.append(errors)
        self._count(errors, 1)
        if len(self._kept) > self._most:
            self._count(self._kept.popleft(), -1)

    def add_older(self, errors: tuple[int, int]) -> None:
        """Adds a run older than all that are kept. `has_room` must hold."""
        self._kept.appendleft(errors)
        self._count(errors, 1)

    def _count(self, errors: tuple[int, int], sign: int) -> None:
        self._guesses += sign * errors[0]
        self._limits += sign * errors[1]


def _errors(one: JudgedRun) -> tuple[int, int]:
    return _error(one.guess_s, one.run_s), _error(one.limit_s, one.run_s)


def _error(said_s: float, run_s: float) -> int:
    return round(abs(log(max(_SHORTEST_S, said_s) / max(_SHORTEST_S, run_s))) * _UNITS)
