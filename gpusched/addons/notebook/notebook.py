"""`%%gpu`: run a cell of a notebook as a job, and `%gpu OPTIONS -- CODE` a line. Loaded by `%load_ext gpusched`, in
IPython and Jupyter alike.

The cell is a call of `gpusched.sdk.cell.run_cell`, which travels as an executor's calls do: in files that only the user
can read.
"""

from __future__ import annotations

import os
import pickle
import posixpath
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from gpusched.addons.executor.folder import CallFolder
from gpusched.cli import forecast, output
from gpusched.cli.environment import captured, current_folder, named_variables, umask
from gpusched.cli.help import help_text
from gpusched.cli.parse import OptionTable, parse, split_words
from gpusched.cli.submission import spec_of
from gpusched.errors import CallRaised, GpuschedError, JobFailed, UsageError
from gpusched.model.option import FAIL, LAYOUT, RES, WHAT, WHEN, WHERE, Option
from gpusched.model.spec import FIELDS
from gpusched.model.units import format_duration, gpu_list, printable
from gpusched.sdk import call as call_module
from gpusched.sdk.cell import MissingOutput, packed, run_cell
from gpusched.sdk.cell import parse as parse_cell
from gpusched.sdk.client import Client
from gpusched.sdk.values import JobInfo

MAGIC = "%%gpu"
SOON_S = 1.0
"""A job that starts within this time is not reported as waiting."""
LOOK_S = 5.0
END_S = 20.0
"""How long the end of a cancelled job is waited for."""
_OTHERWISE = frozenset({"venv", "conda"})
"""Fields of a job that a cell has no choice of: it runs in the interpreter of its notebook."""


_SECTIONS = (RES, WHEN, WHERE, WHAT, LAYOUT, FAIL)
"""Of the options that a cell has: none of files, and none of containers, whose interpreter is another."""


class CellError(Exception):
    """A cell was not run, or has failed; shown in the notebook without the traceback of this program."""

    def __init__(self, message: str, hint: str = "", job_id: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        self.job_id = job_id

    def _render_traceback_(self) -> list[str]:
        """What IPython shows."""
        return [f"{MAGIC}: {self}", *([f"{MAGIC}: hint: {self.hint}"] if self.hint else [])]


class CellInterrupted(KeyboardInterrupt):
    """The cell was interrupted, and its job cancelled."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows."""
        return [f"{MAGIC}: {self}"]


def cell_table() -> OptionTable:
    """Options of the magic: variables in and out, and those of grun that concern the job."""
    own = [
        Option(
            "-i --in NAMES  variables of the notebook that the cell uses: data, model",
            "Variables",
            _names,
            key="inputs",
        ),
        Option(
            "-o --out NAMES  variables of the cell to bring back into the notebook", "Variables", _names, key="outputs"
        ),
    ]
    of_fields = [
        option
        for field in FIELDS.values()
        for option in field.options
        if option.is_shared and field.name not in _OTHERWISE and option.section in _SECTIONS
    ]
    help_option = Option("-h --help  show this text", "Other")
    return OptionTable(
        MAGIC, [*own, *sorted(of_fields, key=lambda option: _SECTIONS.index(option.section)), help_option]
    )


def _names(text: str) -> list[str]:
    names = [word.strip() for word in text.split(",")]
    for name in names:
        if not name.isidentifier():
            raise ValueError(f"{printable(name, 40)!r} is not the name of a variable")
    return names


def load_ipython_extension(shell: Any) -> None:
    """Define the magics; called by `%load_ext gpusched`. Args: shell: IPython's."""

    def gpu(line: str, cell: str) -> None:
        CellRun(shell.user_ns).magic(line, cell)

    def gpu_line(line: str) -> None:
        CellRun(shell.user_ns).magic(*divided(line))

    gpu.__doc__ = f"Run the cell as a job of the scheduler; see {MAGIC} --help."
    gpu_line.__doc__ = f"Run the code after -- as a job of the scheduler; see {MAGIC} --help."
    # IPython would take braces and dollars of the code for variables of the notebook.
    vars(gpu_line)["_ipython_magic_no_var_expand"] = True
    shell.register_magic_function(gpu, "cell", "gpu")
    shell.register_magic_function(gpu_line, "line", "gpu")


def divided(line: str) -> tuple[str, str]:
    """Options and code of a line: `-g 1 -o y -- y = f(x)`. Raises: CellError without any code."""
    options, _, code = f" {line} ".partition(" -- ")
    if not code.strip() and not {"-h", "--help"}.intersection(options.split()):
        raise CellError("there is no code", "write it after two dashes: %gpu -g 1 -i x -o y -- y = f(x)")
    return options.strip(), code.strip()


class CellRun:
    """One cell, from its options to its variables."""

    def __init__(self, variables: dict[str, Any], client: Client | None = None) -> None:
        """Args: variables: of the notebook, read and written."""
        self._variables = variables
        self._client = client or Client()
        self._line = _StatusLine()

    def magic(self, line: str, cell: str) -> None:
        """Run it. Raises: CellError, CellInterrupted."""
        try:
            with self._client:
                self._run(line, cell)
        except GpuschedError as error:
            raise CellError(error.message, error.hint) from None

    def _run(self, line: str, cell: str) -> None:
        table = cell_table()
        try:
            words = split_words(line)
        except ValueError as error:
            raise UsageError(f"{printable(line, 60)!r}: {error}", f"see: {MAGIC} --help") from None
        values, operands, _ = parse(table, words)
        if values.pop("help", None):
            print(help_text(table))
            return
        output.no_operands(operands, f"see: {MAGIC} --help")
        inputs, outputs = values.pop("inputs", []), values.pop("outputs", [])
        _check(cell)
        folder = CallFolder()
        try:
            _write(folder, cell, self._chosen(inputs), outputs)
            ended = self._attend(_spec(values, folder))
            self._take(folder, ended, outputs)
        finally:
            folder.forget(1)
            folder.remove()

    def _chosen(self, names: Sequence[str]) -> dict[str, Any]:
        for name in names:
            if name not in self._variables:
                raise UsageError(f"the notebook has no variable {name}", "run the cell that defines it, or correct -i")
        return {name: self._variables[name] for name in names}

    def _attend(self, spec: dict[str, Any]) -> JobInfo:
        """Submit the job, show why it waits and then its output, until it has ended. Raises: CellInterrupted."""
        try:
            # With its key it may be repeated, and found again.
            answer = self._client._link.call("POST", "/v1/jobs", {"spec": spec}, again=True)
            job_id = str(answer["job"]["id"])
            for note in answer.get("notes", ()):
                print(f"{MAGIC}: {printable(note)}")
            self._await_start(job_id)
            for text in self._client.logs(job_id, follow=True, pieces=True):
                sys.stdout.write(text)
                sys.stdout.flush()
                self._line.is_open = not text.endswith("\n")
            self._line.end()
            return self._client.wait(job_id)
        except KeyboardInterrupt:
            self._line.end()
            raise self._cancelled(spec) from None

    def _cancelled(self, spec: Mapping[str, Any]) -> CellInterrupted:
        """Cancel the job, wherever it was when the interrupt came; returns what to say."""
        found = [job.id for job in self._client.jobs(names=[spec["name"]]) if job.key == spec["key"]]
        if not found:
            # The submission may still be on its way: this one either finds its job, or makes one that never starts.
            try:
                answer = self._client._link.call("POST", "/v1/jobs", {"spec": {**spec, "hold": True}}, again=True)
            except GpuschedError:
                return CellInterrupted("interrupted before there was a job")
            found = [str(answer["job"]["id"])]
        self._client.cancel(found)
        try:
            self._client.wait(found, END_S)
        except (TimeoutError, KeyboardInterrupt):
            return CellInterrupted(f"job {found[0]} is being cancelled; see: gshow {found[0]}")
        return CellInterrupted(f"job {found[0]} was cancelled")

    def _await_start(self, job_id: str) -> None:
        patience_s = SOON_S
        while True:
            query = f"ids={job_id}&state_not=PENDING&timeout_s={patience_s:g}"
            if self._client.call("GET", f"/v1/wait?{query}")["jobs"][0]["state"] != "PENDING":
                break
            why = self._client.call("GET", f"/v1/jobs/{job_id}/why")["why"]
            if why["state"] == "PENDING":
                self._line.show(f"job {job_id} waits: {_waiting(why)}")
            patience_s = LOOK_S
        job = self._client.job(job_id)
        if job.start_at is not None:
            gpus = f", GPU {gpu_list([gpu.index for gpu in job.gpus])}" if job.gpus else ""
            waited = f" after {format_duration(job.start_at - job.submit_at)}" if self._line.was_shown else ""
            self._line.show(f"job {job_id} runs on {printable(job.node or '?')}{gpus}{waited}")
        self._line.end()

    def _take(self, folder: CallFolder, job: JobInfo, outputs: Sequence[str]) -> None:
        """Bring the results into the notebook. Raises: CellError."""
        facts = {name: getattr(job, name) for name in ("id", "exit_code", "signal", "run", "reason", "reason_text")}
        try:
            content = folder.take(1, {**facts, "state": job.state.value}, "the cell")
        except MissingOutput as error:
            raise CellError(f"{error}; job {job.id} has ended", "correct -o", job.id) from None
        except JobFailed as error:
            why = job.reason_text or job.state.value
            has_raised = job.state == "FAILED" and isinstance(error, CallRaised)
            text = error.message if has_raised else f"job {job.id}: {why}"
            raise CellError(text, f"see: gshow {job.id}", job.id) from error
        except BaseException as error:
            # Also what would end this notebook, as the cell's sys.exit().
            said = printable(f"{type(error).__name__}: {error}", 500)
            hint = f"its traceback is above, and in: glogs {job.id}"
            raise CellError(f"job {job.id} failed: {said}", hint, job.id) from error
        folder.forget_log(job.id)
        took = "" if job.start_at is None or job.end_at is None else f" in {format_duration(job.end_at - job.start_at)}"
        try:
            self._variables.update(pickle.loads(content))
        except Exception as error:
            raise CellError(
                f"{', '.join(outputs)} cannot be read here: {printable(str(error), 300)}", "", job.id
            ) from error
        brought = f"; brought back {', '.join(outputs)}" if outputs else ""
        print(f"{MAGIC}: job {job.id} completed{took}{brought}")


def _check(cell: str) -> None:
    """Raises: CellError for invalid Python, before it waits in a queue."""
    if not cell.strip():
        raise UsageError("the cell is empty", "write its code below the line with %%gpu")
    try:
        parse_cell(cell)
    except SyntaxError as error:
        said = f"line {error.lineno}: {error.msg}: {printable((error.text or '').strip(), 60)}"
        is_magic = (error.text or "").lstrip()[:1] in ("%", "!")
        hint = "a cell that runs as a job is plain Python: use subprocess in place of !" if is_magic else ""
        raise CellError(said, hint) from None


def _write(folder: CallFolder, cell: str, inputs: Mapping[str, Any], outputs: Sequence[str]) -> None:
    try:
        folder.write(1, run_cell, (cell, packed(inputs), outputs), {}, with_main=False)
    except Exception as error:
        raise CellError(
            f"the variables {', '.join(inputs)} cannot travel: {printable(str(error), 300)}",
            "let the cell make them itself, for example open the file there",
        ) from error


def _spec(values: dict[str, Any], folder: CallFolder) -> dict[str, Any]:
    spec = spec_of(values)
    spec.setdefault("work_dir", current_folder())
    spec.setdefault("name", "cell")
    # Output is shown as it is printed.
    spec["env"] = {"PYTHONUNBUFFERED": "1", **captured({})}
    spec["env_named"] = sorted({*named_variables({}), "PYTHONUNBUFFERED"})
    spec["umask"] = umask()
    spec["argv"] = [sys.executable, os.path.abspath(call_module.__file__), folder.path, "1"]
    spec["stdout"] = folder.log_pattern()
    # Names this submission, which may then be repeated.
    spec.setdefault("key", f"cell-{posixpath.basename(folder.path)}-{uuid.uuid4().hex[:12]}")
    return spec


def _waiting(why: Mapping[str, Any]) -> str:
    """Reason and expected start of a pending job."""
    text = printable(why["text"])
    start = why.get("start")
    if start is None or why["facts"].get("expected_at") is not None:
        return text
    return f"{text}; expected {forecast.when(start['low_at'], start['high_at'], time.time())}"


class _StatusLine:
    """A line that is overwritten, in a terminal and in a notebook alike."""

    def __init__(self) -> None:
        self.is_open = False
        """The output ends within a line."""
        self.was_shown = False
        self._width = 0

    def show(self, text: str) -> None:
        line = f"{MAGIC}: {text}"
        sys.stdout.write(f"\r{line.ljust(self._width)}")
        sys.stdout.flush()
        self._width, self.is_open, self.was_shown = len(line), True, True

    def end(self) -> None:
        """Begin a new line."""
        if self.is_open:
            print(flush=True)
        self.is_open, self._width = False, 0
