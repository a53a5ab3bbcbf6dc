"""Exceptions of gpusched, as a tree.

    GpuschedError
      UserError            an invalid request: the caller can fix it
        UsageError           it cannot be parsed (exit code 2)
        Refused              it is valid but cannot be granted
        NotFound             it names something that does not exist
        Forbidden            it names something that belongs to another user
        TooMany              it exceeds the rate or number allowed to one user
        TooSlow              it did not arrive in time
      NotReady             the environment is not ready: daemon, disk, database, driver
        DaemonUnreachable    no daemon answers on the socket
        DaemonBusy           a daemon exists but does not answer (starting or stopping)
        StoreBroken          the database is corrupt or was written by a newer release
        StoreFull            the disk with the database is full
      JobFailed            an awaited job ended without a result
      WaitTimeout          the awaited event did not happen in time
      BrokenInvariant      our bug: a state that the design rules out

A message is one sentence with the offending value; the hint is the next command to type. Every command-line
client imports this module, so it imports nothing.
"""


class GpuschedError(Exception):
    """Base class, with a message, a hint, a stable code word and the process exit code."""

    code = "error"
    exit_code = 1
    http_status = 500
    mistakes: "tuple[GpuschedError, ...]" = ()
    """For an error that combines several: all of them, each with its own sentence and hint."""
    about = ""
    """What of a submission or a step was refused: one of `ABOUT`, for programs; empty for anything else."""

    def __init__(self, message: str, hint: str = "", about: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if about:
            self.about = about

    def document(self) -> "dict[str, object]":
        """The error as JSON has it: message, hint, code, and what it is about and combines, if anything."""
        words: dict[str, object] = {"message": self.message, "hint": self.hint, "code": self.code}
        if self.about:
            words["about"] = self.about
        if self.mistakes:
            words["mistakes"] = [{"message": one.message, "hint": one.hint} for one in self.mistakes]
        return words

    def answer(self) -> "dict[str, object]":
        """The document that tells of it: printed with --json, and sent over HTTP."""
        return {"schema_version": 1, "error": self.document()}

    @classmethod
    def of(cls, mistakes: "list[GpuschedError]") -> "GpuschedError":
        """Combine one or more errors into one; returns a single one unchanged."""
        if len(mistakes) == 1 and isinstance(mistakes[0], cls):
            return mistakes[0]
        error = cls("; ".join(one.message for one in mistakes), mistakes[0].hint)
        error.mistakes = tuple(mistakes)
        return error


ABOUT = (
    *(
        "queue",
        "queue_access",
        "qos",
        "qos_access",
        "account",
        "reservation",
        "reservation_access",
        "nice",
        "dependency",
        "array",
    ),
    *("deadline", "constraint", "node", "nodes", "cpus", "memory", "gpus", "resource", "license", "size", "time"),
    *("policy", "job_count", "not_running"),
)
"""What a refusal of a submission or a step may be about. The words are stable; sentences are not.

size: no node has all of the request together; policy: more than queue or QOS allow one job; job_count: too many jobs;
not_running: of a step, whose job takes no more.
"""


class Concerning:
    """Context in which an error is about one part of a submission: `with Concerning("array"): ...`."""

    __slots__ = ("_about",)

    def __init__(self, about: str) -> None:
        self._about = about

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, place: object) -> None:
        if isinstance(error, GpuschedError) and not error.about:
            error.about = self._about


class UserError(GpuschedError):
    """An invalid request."""

    code = "refused"
    http_status = 409


class UsageError(UserError):
    """The request cannot be parsed: an unknown option, an invalid size."""

    code = "usage"
    exit_code = 2
    http_status = 400


class WrongValue(UsageError):
    """The value of an option cannot be read."""

    def __init__(self, message: str, hint: str = "", *, option: str, why: str) -> None:
        """Args: message: of both, `{option}: {why}`."""
        super().__init__(message, hint)
        self.option, self.why = option, why


class Refused(UserError):
    """The request is valid but is not granted."""


class NotFound(UserError):
    """The request names a job, run or device that does not exist."""

    code = "not_found"
    http_status = 404


class Forbidden(UserError):
    """The request concerns something that belongs to another user."""

    code = "forbidden"
    http_status = 403


class SignedOut(UserError):
    """The session of the web page has ended, or there never was one."""

    code = "signed_out"
    http_status = 401


class TooMany(UserError):
    """The user exceeds a limit that protects others; nothing was done, and a later attempt may succeed."""

    code = "too_many"
    http_status = 429
    retry_after_s = 1.0


class TooSlow(UserError):
    """The rest of a request did not arrive in time."""

    code = "too_slow"
    http_status = 408


class NotReady(GpuschedError):
    """The environment is not ready; a later attempt may succeed."""

    code = "not_ready"
    http_status = 503


class DaemonUnreachable(NotReady):
    """No daemon answers on the socket."""

    code = "no_daemon"


class DaemonBusy(NotReady):
    """The daemon of this home exists but does not answer: it is starting or stopping."""

    code = "daemon_busy"


class StoreBroken(NotReady):
    """The database cannot be used: corrupt, or written by a newer release."""

    code = "store_broken"


class StoreFull(NotReady):
    """The disk with the database is full."""

    code = "disk_full"
    http_status = 507


class JobFailed(GpuschedError):
    """An awaited job ended without a result; its attributes say how."""

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


class CallRaised(JobFailed):
    """An awaited call raised an exception that cannot be raised here as well."""


class WaitTimeout(GpuschedError, TimeoutError):
    """The awaited event did not happen in time; it still may."""

    code = "timeout"


class BrokenInvariant(GpuschedError):
    """A state that the design rules out; the message has the job's details."""

    code = "bug"
