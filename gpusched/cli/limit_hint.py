"""A line after a submission without a time limit: what jobs like it took, and when it would start with one.

It is asked for when the job is accepted and the user has been told so, waited for no longer than `BUDGET_S`, and said
once a day. A file of the user's keeps when: its time of modification is the instant until which nothing is asked.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time

from gpusched import paths
from gpusched.cli import output
from gpusched.errors import GpuschedError
from gpusched.private import make_private

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.client import Client

BUDGET_S = 0.5
SAID_S = 86_400.0
"""Nothing is asked for so long after it was said."""
SLOW_S = 0.1
"""An answer that takes longer and says nothing is not asked for again for `REST_S`."""
REST_S = 600.0
_OFF = ("0", "no", "off", "false")
_NO_PERSON = (
    *("GPUSCHED_JOB_ID", "SLURM_JOB_ID"),
    *("CI", "GITHUB_ACTIONS", "GITLAB_CI", "JENKINS_URL", "BUILDKITE", "TEAMCITY_VERSION", "TF_BUILD"),
)
"""Variables that tell of a job, or of continuous integration."""


def is_typed_by_hand() -> bool:
    """Whether a person at a terminal typed this command, and has not asked to be spared hints.

    A shell gives what is typed a process group of its own; the commands of a script share that of the script.
    """
    if not (sys.stdout.isatty() and sys.stderr.isatty()) or os.getpgrp() != os.getpid():
        return False
    if os.environ.get("GPUSCHED_HINTS", "").lower() in _OFF:
        return False
    return not any(os.environ.get(name, "").lower() not in ("", *_OFF) for name in _NO_PERSON)


def say(client: Client, job_id: str) -> None:
    """Say what a time limit would change, at most once a day, if it is known within the budget; never fails."""
    try:
        make_private(paths.state_dir())
        mark = os.open(paths.limit_hint(), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except (OSError, GpuschedError):
        # Where it cannot be kept that it was said, it would be said each time.
        return
    try:
        # Of several at once, as from xargs, one asks.
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        began = time.time()
        if began < os.fstat(mark).st_mtime <= began + SAID_S:
            return
        # Kept first: whoever is killed meanwhile is not told twice.
        _rest_until(mark, began + REST_S)
        text = _text(client.try_once(f"/v1/jobs/{job_id}/limit-hint", BUDGET_S), job_id)
        now = time.time()
        if text:
            _rest_until(mark, now + SAID_S)
            output.note("gsub", text)
        elif now - began < SLOW_S:
            _rest_until(mark, now)
    except OSError:
        return
    except KeyboardInterrupt:
        # The job is accepted; only the hint is not waited for.
        return
    finally:
        os.close(mark)


def _rest_until(mark: int, at: float) -> None:
    os.utime(mark, (at, at))


def _text(answer: dict[str, Any] | None, job_id: str) -> str:
    hint = answer and answer["hint"]
    if not hint:
        return ""
    from gpusched.cli.ahead import instant
    from gpusched.model.units import format_duration

    now = time.time()
    with_limit = instant(hint["start_at"], now)
    expected = "would start now" if with_limit == "now" else f"is expected at about {with_limit}"
    default_s, without_at = hint["time_limit_s"], hint["start_without_at"]
    without = "without one" if default_s is None else f"with the default of {format_duration(default_s)}"
    otherwise = "nobody knows when" if without_at is None else f"at about {instant(without_at, now)}"
    return (
        f"jobs like it took {hint['usual']}; with -t {hint['typed']} it {expected}, {without} {otherwise}: "
        f"gctl update {job_id} time={hint['typed']}"
    )
