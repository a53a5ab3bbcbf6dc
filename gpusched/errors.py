"""Everything gpusched raises on purpose, as a tree.

    GpuschedError
      UserError            what was asked is wrong: the caller can mend it
        UsageError           it cannot be read at all (exit code 2)
        Refused              it is readable but cannot be granted
        NotFound             it names something that does not exist
        Forbidden            it names something that belongs to another user
        TooMany              it comes too soon after others of the same user
        TooSlow              it did not arrive in time
      NotReady             the surroundings are not ready: daemon, disk, database, driver
        DaemonUnreachable    no daemon answers on the socket
        DaemonBusy           one that does not answer yet, or any more, is there
        StoreBroken          the database is corrupt or was written by a newer release
        StoreFull            the disk that holds the database cannot take more
      JobFailed            a job whose result was waited for did not give one
      WaitTimeout          what was waited for has not happened in time
      BrokenInvariant      our bug: a state that the design says cannot happen

A message is one sentence with the offending value; the hint is the next command to type. This
module is imported by every command at the prompt, so it imports nothing.
"""


class GpuschedError(Exception):
    """Base of all: carries a message, a hint, a stable code word and the process exit code."""

    code = "error"
    exit_code = 1
    http_status = 500
    mistakes: "tuple[GpuschedError, ...]" = ()
    """Of an error that stands for several: all of them, each with a sentence and hint of its own."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    @classmethod
    def of(cls, mistakes: "list[GpuschedError]") -> "GpuschedError":
        """One error for all of these, which are at least one; that one itself when it is alone and of this kind."""
        if len(mistakes) == 1 and type(mistakes[0]) is cls:
            return mistakes[0]
        error = cls("; ".join(one.message for one in mistakes), mistakes[0].hint)
        error.mistakes = tuple(mistakes)
        return error


class UserError(GpuschedError):
    """What was asked is wrong."""

    code = "refused"
    http_status = 409


class UsageError(UserError):
    """The request cannot be read: an unknown option, a size that does not parse."""

    code = "usage"
    exit_code = 2
    http_status = 400


class Refused(UserError):
    """The request is readable and will not be granted."""


class NotFound(UserError):
    """The request names a job, run or device that does not exist."""

    code = "not_found"
    http_status = 404


class Forbidden(UserError):
    """The request touches what belongs to another user."""

    code = "forbidden"
    http_status = 403


class TooMany(UserError):
    """A user asks for more at once than others leave to one; nothing was done, and later it will be."""

    code = "too_many"
    http_status = 429
    retry_after_s = 1.0


class TooSlow(UserError):
    """The request was begun and its rest did not come."""

    code = "too_slow"
    http_status = 408


class NotReady(GpuschedError):
    """The surroundings are not ready; trying again later may work."""

    code = "not_ready"
    http_status = 503


class DaemonUnreachable(NotReady):
    """No daemon answers on the socket."""

    code = "no_daemon"


class DaemonBusy(NotReady):
    """A daemon of this home is there that does not answer: it is on its way up, or down."""

    code = "daemon_busy"


class StoreBroken(NotReady):
    """The database cannot be used: corrupt, or written by a newer release."""

    code = "store_broken"


class StoreFull(NotReady):
    """The disk that holds the database cannot take another record."""

    code = "disk_full"
    http_status = 507


class JobFailed(GpuschedError):
    """A job ended without the result that was waited for; what it ended as is in its attributes."""

    code = "job_failed"

    def __init__(
        self,
        message: str,
        hint: str = "",
        *,
        job_id: str = "",
        state: str = "",
        job_exit_code: int | None = None,
        job_signal: int | None = None,
    ) -> None:
        super().__init__(message, hint)
        self.job_id = job_id
        self.state = state
        self.job_exit_code = job_exit_code
        self.job_signal = job_signal


class WaitTimeout(GpuschedError, TimeoutError):
    """What was waited for has not happened in time; it may still happen."""

    code = "timeout"


class BrokenInvariant(GpuschedError):
    """A state that the design rules out was met; the message carries the job's story."""

    code = "bug"
