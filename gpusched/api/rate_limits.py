"""Limits on one user's request rate, bytes in flight and bytes stored, which keep the daemon responsive to others.

The daemon's own user, root in system mode, is exempt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from gpusched.access import is_root
from gpusched.errors import Refused, TooMany
from gpusched.lifecycle.arrays import jobs_in
from gpusched.model.commands import Caller
from gpusched.model.job import JobSpec
from gpusched.model.settings import LimitSettings
from gpusched.model.units import format_duration
from gpusched.paths import MAX_REQUEST

MAX_BODY = MAX_REQUEST
BODIES_PER_USER = 2 * MAX_BODY
BODIES = 8 * MAX_BODY
"""Bytes of requests being read at once, per user and in total; they are held in memory."""
BODY_S = 20.0
LEAST_BYTES_PER_S = 1 << 20
"""The time allowed for a body is BODY_S plus its size divided by this rate; a local client needs milliseconds."""
JOB_BYTES = 1024
"""Size of a row of the job table without its texts."""
FREE_S = 0.02
"""Free time of each request; interactive commands and scripts take less."""
BUSY_PART = 0.5
"""Share of the daemon's time that one user may take beyond that, on average."""
_DAY_S = 86400.0
_FORGET = 4096
"""Users remembered before those with full buckets are dropped."""


class TokenBucket:
    """A bucket of tokens that refills at a constant rate."""

    __slots__ = ("_at", "_left")

    def __init__(self, most: float, now: float) -> None:
        self._left = most
        self._at = now

    def take(self, tokens: float, most: float, rate: float, now: float) -> float:
        """Take the tokens if there are enough; otherwise take none and return the seconds until there are."""
        self._left = min(most, self._left + (now - self._at) * rate)
        self._at = now
        # More than the bucket holds waits for a full bucket: oversized requests are refused elsewhere.
        wanted = min(tokens, most)
        if self._left >= wanted:
            self._left -= tokens
            return 0.0
        return (wanted - self._left) / rate

    def owe(self, tokens: float) -> None:
        """Take tokens in advance; the next caller waits until the debt is refilled."""
        self._left -= tokens

    def is_full(self, most: float, rate: float, now: float) -> bool:
        """Whether the bucket is full, like a new one."""
        return self._left + (now - self._at) * rate >= most


class RateLimits:
    """Tracks the requests of each user."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Args: clock: a monotonic clock in seconds."""
        self._clock = clock
        self._requests: dict[int, TokenBucket] = {}
        self._bytes: dict[int, TokenBucket] = {}
        self._reading: dict[int, int] = {}

    def request(self, caller: Caller, limit: LimitSettings) -> None:
        """Count one request. Raises: TooMany."""
        if is_root(caller):
            return
        most, rate = float(limit.requests_burst), limit.requests_per_s
        wait_s = self._bucket(self._requests, caller.uid, most, rate).take(1.0, most, rate, self._clock())
        if wait_s:
            raise too_many(
                f"{caller.user} makes more than {rate:g} requests per second, or expensive ones",
                wait_s,
                "ask for many jobs in one request: gq 1,2,3, gsub --batch FILE, gsub -a 0-99",
            )

    def submission(
        self, caller: Caller, specs: Sequence[JobSpec], payloads: int, limit: LimitSettings, copies: int = 1
    ) -> None:
        """Count what a submission adds to the database. Raises: Refused.

        Args: payloads: bytes of its scripts, environments and lines. copies: number of jobs that each spec stands for.
        """
        if is_root(caller):
            return
        size = float(payloads)
        known: dict[int, int] = {}
        for spec in specs:
            for part in (spec.launch.argv, spec.request, spec.array, spec.alerting):
                # Equal jobs share them in memory, but each row stores its own.
                if id(part) not in known:
                    known[id(part)] = _length(part)
                size += known[id(part)] * copies
            texts = (spec.fallback, spec.dependency, spec.launch.stdout, spec.launch.stderr, spec.launch.work_dir)
            size += (jobs_in(spec) * JOB_BYTES + sum(len(text) for text in texts if text)) * copies
        self._take_bytes(caller, size, limit)

    def check_writing(self, caller: Caller, limit: LimitSettings) -> None:
        """Refuse a change by a user whose changes have used up their allowance. Raises: Refused."""
        if not is_root(caller):
            self._take_bytes(caller, 0.0, limit)

    def written(self, caller: Caller, size: float, limit: LimitSettings) -> None:
        """Count what a change has added to the database, if that is known only afterwards."""
        if not is_root(caller) and size:
            most = limit.submitted_mib_per_user * (1 << 20)
            self._bucket(self._bytes, caller.uid, most, most / _DAY_S).owe(size)

    def _take_bytes(self, caller: Caller, size: float, limit: LimitSettings) -> None:
        most = limit.submitted_mib_per_user * (1 << 20)
        wait_s = self._bucket(self._bytes, caller.uid, most, most / _DAY_S).take(
            size, most, most / _DAY_S, self._clock()
        )
        if wait_s:
            raise Refused(
                f"{caller.user} has submitted {limit.submitted_mib_per_user:g} MiB of jobs, scripts, environments and "
                "changes within a day, the maximum",
                f"wait {format_duration(wait_s)}, or ask an admin to raise [limit] submitted_mib_per_user",
            )

    def spent(self, caller: Caller, busy_s: float, limit: LimitSettings) -> None:
        """Count the time for which a request blocked all others as additional requests."""
        if busy_s > FREE_S and not is_root(caller):
            bucket = self._bucket(self._requests, caller.uid, float(limit.requests_burst), limit.requests_per_s)
            bucket.owe((busy_s - FREE_S) * limit.requests_per_s / BUSY_PART)

    @contextmanager
    def body(self, caller: Caller, size: int) -> Iterator[None]:
        """Count the bytes of a request while they are read. Raises: TooMany."""
        if is_root(caller) or not size:
            yield
            return
        own, all_of_them = self._reading.get(caller.uid, 0), sum(self._reading.values())
        if own + size > BODIES_PER_USER or all_of_them + size > BODIES:
            raise too_many(
                f"{(own + size) >> 20} MiB of requests by {caller.user} are being received at once",
                1.0,
                "send them one after another",
            )
        self._reading[caller.uid] = own + size
        try:
            yield
        finally:
            left = self._reading[caller.uid] - size
            if left:
                self._reading[caller.uid] = left
            else:
                del self._reading[caller.uid]

    def _bucket(self, buckets: dict[int, TokenBucket], uid: int, most: float, rate: float) -> TokenBucket:
        now = self._clock()
        bucket = buckets.get(uid)
        if bucket is None:
            if len(buckets) >= _FORGET:
                for one in [one for one, old in buckets.items() if old.is_full(most, rate, now)]:
                    del buckets[one]
            bucket = buckets[uid] = TokenBucket(most, now)
        return bucket


def _length(part: object) -> int:
    """Approximate number of characters that a row stores of it."""
    return sum(len(word) + 3 for word in part) if isinstance(part, tuple) else len(repr(part))


def too_many(message: str, wait_s: float, hint: str) -> TooMany:
    """A refusal with the time to retry after."""
    error = TooMany(message, hint)
    error.retry_after_s = max(0.05, wait_s)
    return error
