"""`gctl queue pause` and `resume`: whether anything new starts from a queue."""

from __future__ import annotations

import shlex
import sys

from gpusched.cli import output
from gpusched.client import connect
from gpusched.errors import UsageError
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpusched.cli.parse import Values


def change(action: str, names: Sequence[str], values: Values) -> int:
    """Pause or resume queues, each by itself; the first that is refused ends the command. Raises: UserError."""
    verb = action.removeprefix("queue ")
    if not names:
        raise UsageError(f"gctl queue {verb} needs a name", f"for example: gctl queue {verb} vision")
    message = values.get("message", "")
    what = shlex.join(["gctl", "queue", verb, *names, *(["-m", message] if message else [])])
    done = []
    with connect() as client:
        for name in names:
            body = {"queue": name, "what": what, **({"message": message} if message else {})}
            answer = client.call("POST", f"/v1/queues/{verb}", body)
            done.append(answer)
            if not values.get("json"):
                _tell(verb, answer, is_quiet=bool(values.get("quiet")))
    if values.get("json"):
        output.print_json({"queues": [{key: one[key] for key in one if key != "schema_version"} for one in done]})
    return 0


def _tell(verb: str, answer: dict[str, object], *, is_quiet: bool) -> None:
    name = printable(str(answer["queue"]))
    if not answer["is_changed"]:
        output.note("gctl", f"queue {name} was {'already' if verb == 'pause' else 'not'} paused")
    elif is_quiet:
        sys.stdout.write(f"{name}\n")
    elif verb == "pause":
        sys.stdout.write(f"paused queue {name}: nothing new starts from it, running jobs go on\n")
    else:
        sys.stdout.write(f"resumed queue {name}\n")
