"""The files of an executor: its calls and their results, readable by the owner only."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import tempfile
import time
from concurrent.futures import BrokenExecutor
from typing import Any

from gpusched import paths
from gpusched.errors import CallRaised, JobFailed
from gpusched.paths import make_private

_FORGOTTEN_S = 30 * 86400
"""Folders untouched for this long belong to programs that were killed."""


class RemoteTraceback(Exception):
    """Cause of an exception raised by a call: its traceback as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


class InitializerFailed(BrokenExecutor):
    """The executor's initializer raised in a job, so no call can be made."""


class CallFolder:
    """One executor's folder in the state folder."""

    def __init__(self) -> None:
        root = os.path.join(paths.state_dir(), "calls")
        make_private(paths.state_dir())
        os.makedirs(root, mode=0o700, exist_ok=True)
        _sweep(root)
        self.path = tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=root)

    def write_initializer(self, initializer: Any, arguments: tuple[Any, ...]) -> None:
        """Write the initializer that each job runs first, once for all calls. Raises: the error of pickling it."""
        self._write("initializer", _pickled((initializer, arguments)))

    def write(
        self, number: int, call: Any, arguments: Any, keywords: dict[str, Any] | None, *, with_main: bool = True
    ) -> None:
        """Write a call. Raises: the error of pickling it.

        Args: with_main: whether the job may import this process's main module to find what the call names.
        """
        payload = _pickled((call, arguments, keywords))
        main = _main_of() if with_main else {"main_name": None, "main_path": None}
        setup = pickle.dumps({"path": sys.path, "protocol": pickle.HIGHEST_PROTOCOL, **main})
        self._write(f"{number}.call", setup + payload)

    def _write(self, name: str, content: bytes) -> None:
        path = os.path.join(self.path, name)
        with open(path, "wb", opener=lambda name, flags: os.open(name, flags | os.O_EXCL, 0o600)) as file:
            file.write(content)

    def take(self, number: int, job: dict[str, Any], name: str) -> Any:
        """The value returned by a call. Raises: the call's exception, or JobFailed if it left no result."""
        path = os.path.join(self.path, f"{number}.result")
        try:
            with open(path, "rb") as file:
                is_ours = os.fstat(file.fileno()).st_uid == os.geteuid()
                document = pickle.load(file) if is_ours else None
        except FileNotFoundError:
            document = None
        # A result of an earlier attempt is not that of the last one.
        if document is None or (document["run"] and not document["run"].endswith(f".{job['run']}")):
            raise _failure(job, name)
        # Classes of the main module are unpickled under their name in the job.
        sys.modules.setdefault("__mp_main__", sys.modules["__main__"])
        if document["ok"]:
            return pickle.loads(document["value"])
        cause = RemoteTraceback(document["text"])
        if document.get("is_initializer"):
            said = document["text"].strip().rpartition("\n")[2]
            raise InitializerFailed(f"the initializer failed in job {job['id']}: {said}") from cause
        if isinstance(document["value"], str):
            raise CallRaised(
                f"the call of {name} raised {document['value']}, which cannot be pickled",
                f"see its output with: glogs {job['id']}",
                job_id=job["id"],
                state=job["state"],
                job_exit_code=job["exit_code"],
            ) from cause
        raise pickle.loads(document["value"]) from cause

    def forget(self, number: int) -> None:
        """Delete the files of a finished call."""
        for ending in ("call", "result", "result.new"):
            _unlink(os.path.join(self.path, f"{number}.{ending}"))

    def log_pattern(self) -> str:
        """Default output path of the jobs."""
        return os.path.join(self.path.replace("%", "%%"), "%j.out")

    def forget_log(self, job_id: str) -> None:
        """Delete the output of a successful call; it is kept only as long as the executor."""
        _unlink(os.path.join(self.path, f"{job_id}.out"))

    def remove(self) -> None:
        """Delete the folder, unless it holds the output of a failed call."""
        _unlink(os.path.join(self.path, "initializer"))
        try:
            os.rmdir(self.path)
        except OSError:
            pass  # kept for `glogs`, and swept later


def _failure(job: dict[str, Any], name: str) -> JobFailed:
    why = job["reason_text"] or job["reason"] or ""
    return JobFailed(
        f"job {job['id']}, the call of {name}, is {job['state']}{': ' if why else ''}{why}; it left no result",
        f"see its output with: glogs {job['id']}",
        job_id=job["id"],
        state=job["state"],
        job_exit_code=job["exit_code"],
        job_signal=job["signal"],
    )


def _pickled(value: Any) -> bytes:
    main = _main_of()
    try:
        payload = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        if b"__main__" not in payload or main["main_name"] or main["main_path"]:
            return payload
        problem: Exception = pickle.PicklingError("what is defined at a prompt cannot be found by a job")
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        problem = error
    try:
        import cloudpickle  # type: ignore[import-not-found, import-untyped, unused-ignore]  # used where it is there, never required
    except ImportError:
        if isinstance(problem, TypeError):
            raise problem from None  # a lock, an open file: cannot be pickled at all
        from gpusched.extras import install_command  # hardly ever needed

        raise pickle.PicklingError(
            f"{problem}; put it into a module, or let lambdas, closures and what is defined at a prompt travel too, by "
            f"cloudpickle: {install_command('executor')}"
        ) from problem
    return bytes(cloudpickle.dumps(value, pickle.HIGHEST_PROTOCOL))


def _main_of() -> dict[str, str | None]:
    """How a job can import the definitions of this process's main module."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    path = getattr(main, "__file__", None)
    is_file = path is not None and os.path.exists(path)
    return {
        "main_name": None if spec is None else spec.name,
        "main_path": os.path.abspath(path) if spec is None and path is not None and is_file else None,
    }


def _sweep(root: str) -> None:
    for name in os.listdir(root):
        path = os.path.join(root, name)
        try:
            is_old = time.time() - os.stat(path).st_mtime > _FORGOTTEN_S
        except FileNotFoundError:
            continue  # another process is sweeping, too
        if is_old:
            shutil.rmtree(path, ignore_errors=True)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass  # it was never created
