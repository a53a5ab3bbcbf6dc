"""Whether a user's jobs are better described by the time limits stated or by predictions; kept up to date per run.

The measure is the mean of |log(said / true)| over the newest runs: 0 when all was said right, log 2 when it was off by
a factor of two on average, whichever way. `factor` has it as that factor. True is how long a run held what it was
given: of one that was ended at its limit, the limit (what that says of jobs like it is for `overruns`).

Each user is judged by runs of their own; one with few of them by those of everybody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import exp, log

from gpusched.model.value import Value

KEPT = 500
"""The newest runs of everybody that are judged by."""

KEPT_OF_USER = 100
"""The newest runs of one user that this user is judged by."""

MOST_USERS = 1000
"""Beyond these, users whose last run ended longest ago are forgotten: they are judged as everybody."""

LEAST = 20
"""With fewer nothing is said: of a user, everybody's count instead; of everybody, limits are gone by."""

_SHORTEST_S = 1.0

_UNITS = 1 << 40
"""Of an error, in one."""


class Said(Value):
    """What was said of a run, and how long it was, in seconds."""

    guess_s: float
    limit_s: float
    run_s: float


class Measure(Value):
    """How far off both have been: 1 is right, 2 is off by a factor of two on average."""

    runs: int
    guess_factor: float
    limit_factor: float
    is_own: bool = False
    """Whether these are runs of the user alone who was asked for; else those of everybody."""

    @property
    def is_better(self) -> bool:
        """Whether guesses are what to go by."""
        return self.runs >= LEAST and self.guess_factor < self.limit_factor


class Judge:
    """Keeps how far off what was said of the newest runs was, worked out once for each; it hears of every end."""

    def __init__(self) -> None:
        self._everybody = _Errors(KEPT)
        self._users: dict[str, _Errors] = {}
        """Longest without a run first."""

    def is_better(self, user: str) -> bool:
        """Whether guesses are what to go by for jobs of this user that have a limit."""
        return self._of(user).is_better

    def measure(self, user: str | None = None) -> Measure:
        """How far off both have been, for jobs of this user; None: for everybody's."""
        found = self._everybody if user is None else self._of(user)
        return found.measure(is_own=found is not self._everybody)

    def add(self, user: str, *ended: Said) -> bool:
        """Runs of a user that have ended now, oldest first; whether something else is gone by for this user now."""
        before = self.is_better(user)
        known = self._users.pop(user, None)
        self._users[user] = own = known or _Errors(KEPT_OF_USER)
        for one in ended:
            errors = _errors(one)
            own.add(errors)
            self._everybody.add(errors)
        while len(self._users) > MOST_USERS:
            del self._users[next(iter(self._users))]
        return self.is_better(user) is not before

    def add_older(self, ended: Iterable[tuple[str, Said]]) -> None:
        """Runs that ended before all that are known, oldest first, each with its user."""
        for user, one in reversed(tuple(ended)):
            own = self._users.get(user)
            if own is None and len(self._users) < MOST_USERS:
                # Heard of before all others.
                self._users = {user: (own := _Errors(KEPT_OF_USER)), **self._users}
            missing = [errors for errors in (own, self._everybody) if errors is not None and errors.has_room]
            if missing:
                found = _errors(one)
                for errors in missing:
                    errors.add_older(found)

    def _of(self, user: str) -> _Errors:
        own = self._users.get(user)
        return self._everybody if own is None or len(own) < LEAST else own


class _Errors:
    """Errors of guess and limit of the newest runs, as whole numbers, so that no digit is lost on the way.

    Invariant: the sums are those of the errors kept.
    """

    __slots__ = ("_guesses", "_kept", "_limits", "_most")

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: deque[tuple[int, int]] = deque()
        """Of guess and limit, oldest first."""
        self._guesses = self._limits = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def has_room(self) -> bool:
        """Whether one more counts that is older than all."""
        return len(self._kept) < self._most

    @property
    def is_better(self) -> bool:
        """Whether guesses have been better; not while there are too few to say."""
        return len(self._kept) >= LEAST and self._guesses < self._limits

    def measure(self, *, is_own: bool) -> Measure:
        """How far off both have been."""
        units = max(1, len(self._kept)) * _UNITS
        return Measure(len(self._kept), exp(self._guesses / units), exp(self._limits / units), is_own)

    def add(self, errors: tuple[int, int]) -> None:
        """Those of the newest run."""
        self._kept.append(errors)
        self._count(errors, 1)
        if len(self._kept) > self._most:
            self._count(self._kept.popleft(), -1)

    def add_older(self, errors: tuple[int, int]) -> None:
        """Those of a run that ended before all that are kept, with room left for it."""
        self._kept.appendleft(errors)
        self._count(errors, 1)

    def _count(self, errors: tuple[int, int], sign: int) -> None:
        self._guesses += sign * errors[0]
        self._limits += sign * errors[1]


def _errors(one: Said) -> tuple[int, int]:
    return _error(one.guess_s, one.run_s), _error(one.limit_s, one.run_s)


def _error(said_s: float, run_s: float) -> int:
    return round(abs(log(max(_SHORTEST_S, said_s) / max(_SHORTEST_S, run_s))) * _UNITS)
