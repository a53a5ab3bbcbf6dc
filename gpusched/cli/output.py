"""Output of the commands: results on stdout, everything else on stderr, errors in one format."""

from __future__ import annotations

import os
import sys

from gpusched import quickjson
from gpusched.errors import GpuschedError, Refused, UsageError
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any, NoReturn

    from gpusched.cli.parse import OptionTable, Values

    Body = Callable[[Values, list[str]], int]
    Command = Callable[[list[str]], int]


def run(command: str, body: Callable[[list[str]], int], words: list[str] | None = None) -> int:
    """Run a command's body; convert any exception into a sentence and an exit code."""
    words = sys.argv[1:] if words is None else words
    _mend_streams()
    asked = os.environ.get(f"_{command.upper()}_COMPLETE")
    if asked:
        from gpusched.cli.help import complete

        return complete(command, asked)
    try:
        try:
            code = _with_warnings(command, body, words)
            sys.stdout.flush()
        except GpuschedError as error:
            sys.stdout.flush()
            return fail(command, error, as_json="--json" in words)
        except BrokenPipeError:
            raise
        except OSError as error:
            if os.environ.get("GPUSCHED_DEBUG"):
                raise
            where = f": {error.filename}" if error.filename else ""
            problem = GpuschedError(f"{error.strerror or error}{where}", "see what is wrong with: gpusched doctor")
            return fail(command, problem, as_json="--json" in words)
        return code
    except BrokenPipeError:
        # The reader has closed the pipe (`gq | head`): nothing to report, and nothing to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except KeyboardInterrupt:
        return 130
    except MemoryError:
        return fail(command, Refused("the memory that this command may use was not enough", "see the limit: ulimit -v"))
    except Exception as error:
        if os.environ.get("GPUSCHED_DEBUG"):
            raise
        sys.stderr.write(
            f"{command}: error: this is a bug in gpusched: {type(error).__name__}: {error}\n"
            f"{command}: hint: report it with the output of: GPUSCHED_DEBUG=1 {command} ...\n"
        )
        return 1


def _with_warnings(command: str, body: Callable[[list[str]], int], words: list[str]) -> int:
    """Run the body and print, even after an error, the warnings that the daemon attached to its answers."""
    try:
        return body(words)
    finally:
        client = sys.modules.get("gpusched.client")
        if client is not None and client.warnings:
            from urllib.parse import unquote_to_bytes  # rarely used

            sys.stdout.flush()
            for text in sorted(client.warnings):
                shown = printable(unquote_to_bytes(text).decode("utf-8", "replace"), 2000)
                sys.stderr.write(f"{command}: warning: {shown}\n")


def _mend_streams() -> None:
    """Open /dev/null for standard streams that a caller closed; escape characters outside of an encoding.

    Otherwise the next file or socket would get the number of the missing stream.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115  open until exit
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def leave(code: int) -> NoReturn:
    """Exit with this code, skipping the interpreter's teardown, which takes longer than most of a gsub.

    For commands that leave nothing to do at exit; threads still running are daemon threads.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            # Errors have been reported as far as possible; the output is incomplete.
            code = code or 1
    os._exit(code)


_SHOWN = 20
"""Errors listed of a combined one."""


def fail(command: str, error: GpuschedError, as_json: bool = False) -> int:
    """Print an error and its hint on stderr, one line each; returns the exit code."""
    if as_json:
        sys.stderr.write(quickjson.dumps(error.answer()) + "\n")
        return error.exit_code
    shown = error.mistakes[:_SHOWN] or (error,)
    for at, one in enumerate(shown):
        sys.stderr.write(f"{command}: error: {one.message}\n")
        is_repeated = at + 1 < len(shown) and shown[at + 1].hint == one.hint
        if one.hint and not is_repeated:
            sys.stderr.write(f"{command}: hint: {one.hint}\n")
    if len(error.mistakes) > _SHOWN:
        sys.stderr.write(f"{command}: and {len(error.mistakes) - _SHOWN} more errors\n")
    return error.exit_code


def note(command: str, text: str) -> None:
    """Print a remark that is not a result."""
    sys.stderr.write(f"{command}: {text}\n")


def tell(command: str, text: str) -> None:
    """As `note`, where the terminal may have been closed."""
    try:
        note(command, printable(text))
        sys.stderr.flush()
    except OSError:
        pass


def notes(command: str, answer: dict[str, Any], key: str = "notes") -> None:
    """Print the remarks of an answer, after the result even if both go to one terminal."""
    sys.stdout.flush()
    for text in answer.get(key, ()):
        note(command, printable(text))


def note_missing(command: str, answer: dict[str, Any]) -> None:
    """Name the requested jobs that do not exist or no longer exist."""
    for job_id in answer.get("missing", ()):
        note(command, f"there is no job {job_id}{' any more' if job_id in answer.get('pruned', ()) else ''}")


def command(make: Callable[[], OptionTable], *, takes_operands: bool = True) -> Callable[[Body], Command]:
    """Have a function run with the values and operands of a command line, which this reads by a table.

    --help, --version and --completion are served here.
    """

    def decorated(body: Body) -> Command:
        def run(words: list[str]) -> int:
            from gpusched.cli.parse import parse  # Slurm's commands do without

            table = make()
            values, operands, _ = parse(table, words, operands_first=True)
            if common(table, values, operands):
                return 0
            if not takes_operands:
                no_operands(operands, f"see: {table.command} --help")
            return body(values, operands)

        return run

    return decorated


def common(table: OptionTable, values: Values, operands: Sequence[str] = ()) -> bool:
    """Serve --help, --version and --completion; returns whether one of them was given.

    Args: operands: behind --help the topics that are asked about. Raises: UsageError for an unknown one.
    """
    if values.get("version"):
        from gpusched import __version__

        sys.stdout.write(f"{table.command} {__version__}\n")
    elif values.get("help"):
        from gpusched.cli.help import help_text

        sys.stdout.write(help_text(table, operands))
    elif values.get("completion"):
        from gpusched.cli.help import completion_script

        sys.stdout.write(completion_script(table, values["completion"]))
    else:
        return False
    return True


def print_json(document: dict[str, Any]) -> None:
    """Print one document; indented at a terminal, compact in a pipe."""
    if sys.stdout.isatty():
        import json

        document.setdefault("schema_version", 1)
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        sys.stdout.write(json_line(document))


def for_programs(values: Values, document: dict[str, Any], bare: Iterable[object]) -> str | dict[str, Any] | None:
    """The document with --json, a bare value per line with --quiet; None with neither."""
    if values.get("json"):
        return document
    return "".join(f"{printable(str(one))}\n" for one in bare) if values.get("quiet") else None


def show(values: Values, document: dict[str, Any], bare: Iterable[object]) -> bool:
    """Print what --json or --quiet asks for; False with neither, nothing printed."""
    found = for_programs(values, document, bare)
    if isinstance(found, str):
        sys.stdout.write(found)
    elif found is not None:
        print_json(found)
    return found is not None


def print_raw(document: bytearray) -> None:
    """Print a document as the daemon sent it, in the format of `json_line`."""
    sys.stdout.flush()
    sys.stdout.buffer.write(document)
    sys.stdout.buffer.write(b"\n")


def json_line(document: dict[str, Any]) -> str:
    """A document on one line, even at a terminal."""
    document.setdefault("schema_version", 1)
    return quickjson.dumps(document) + "\n"


def asks(values: Values) -> bool:
    """Whether to ask before what cannot be undone: at a terminal, without --yes."""
    return not values.get("yes") and sys.stdin.isatty() and sys.stdout.isatty()


LONGEST_ANSWER = 100
"""Characters of an answer that are read: a stream may have no line end."""


def confirm(command: str, question: str, refusal: str) -> None:
    """Ask for confirmation at the terminal. Raises: Refused unless the answer is yes."""
    sys.stderr.write(f"{command}: {question}? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline(LONGEST_ANSWER).strip().lower() not in ("y", "yes"):
        raise Refused(refusal, "skip the question with -y")


def no_operands(operands: Sequence[str], hint: str) -> None:
    """Refuse operands where none can be, or no further ones. Raises: UsageError."""
    if operands:
        raise UsageError(f"unexpected argument {printable(operands[0], 40)!r}", hint)


def exit_code_of(job: dict[str, Any]) -> int:
    """Exit code of a waiting command: the job's own, 128 + signal, or 1."""
    if job["state"] == "COMPLETED":
        return 0
    if job.get("signal"):
        return 128 + int(job["signal"])
    if job.get("exit_code") and job["state"] != "CANCELLED":
        return int(job["exit_code"])
    return 1
