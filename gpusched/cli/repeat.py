"""What gsub does for work that can be repeated: keys, resubmission, snapshots."""

from __future__ import annotations

import sys

from gpusched.cli import output
from gpusched.errors import UsageError
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.cli.parse import Values
    from gpusched.client import Connection
    from gpusched.snapshots.submission import Frozen


def check_resubmission(given: Values, operands: list[str]) -> None:
    """Refuse what says anew what is run. Raises: UsageError."""
    for name in ("wrap", "batch", "export"):
        if name in given:
            raise UsageError(f"--resubmit and --{name} were both given", "use one of them; -E adds a variable")
    if operands:
        raise UsageError(f"--resubmit and {printable(operands[0], 40)} were both given", "use one of them")
    if not given["resubmit"]:
        raise UsageError("--resubmit names no job", "for example: gsub --resubmit 42   or: gsub --resubmit @")
    if given.get("snapshot", "no") != "no":
        raise UsageError("a repeated job starts in the snapshot that it had", "leave --snapshot out, or submit it anew")
    if given.get("mem_per_cpu_mib") is not None and given.get("cpus") is None:
        raise UsageError("--mem-per-cpu says nothing here without -c", "say how much memory in all: -m SIZE")


def check_key(given: Values, values: Values) -> None:
    """Refuse what has no effect. Raises: UsageError."""
    if "key_again" in given and values.get("key") is None:
        raise UsageError(
            "--key-again says when a key makes another job, and there is no --key",
            "for example: gsub --key nightly --key-again failed -- ./nightly",
        )


def take_snapshot(client: Connection, spec: Values, values: Values) -> Frozen | None:
    """Let the job start in a copy of its folder, when that is asked for."""
    mode = values.get("snapshot", "no")
    if mode == "no" or values.get("dry_run"):
        return None
    from gpusched.snapshots.submission import start_in_copy  # hashes and copies: nothing a plain gsub needs

    found = start_in_copy(client.call, client.socket_path, spec, mode)
    if not values.get("quiet"):
        for text in found.notes:
            output.note("gsub", text)
    return found


def keep_snapshots(client: Connection, values: Values) -> None:
    """See that what is repeated has its code still, unless it is told to run elsewhere."""
    if not values.get("resubmit") or "work_dir" in values or values.get("dry_run"):
        return
    from gpusched.snapshots.submission import keep_for_repetition  # as above

    keep_for_repetition(client.call, values["resubmit"])


def say_found(answer: dict[str, Any], values: Values) -> None:
    """Tell a person that nothing new was submitted."""
    if not answer.get("existing") or values.get("json") or values.get("quiet"):
        return
    job = answer["job"]
    # The result comes first, also where both go to one terminal.
    sys.stdout.flush()
    output.note(
        "gsub", f"job {job['id']} ({job['state']}) has the key {printable(job['key'])!r}; nothing new was submitted"
    )
    if answer["differs"]:
        output.note("gsub", f"it was submitted with another {', '.join(answer['differs'])}, and keeps that")
