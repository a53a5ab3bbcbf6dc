"""gcancel: end jobs, or send them a signal."""

from __future__ import annotations

from gpusched.cli import output
from gpusched.cli.options import gcancel_table
from gpusched.cli.query import check_names, ids_in, mine
from gpusched.client import connect
from gpusched.errors import NotFound, UsageError
from gpusched.model.units import name_some

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.cli.parse import Values


_TOLD = 10
"""Maximum number of named jobs in the message about jobs that had already ended."""


def main() -> int:
    return output.run("gcancel", body)


@output.command(gcancel_table)
def body(values: Values, operands: list[str]) -> int:
    """Cancel; returns 1 if a named job does not exist."""
    request: dict[str, Any] = {
        "ids": ids_in(operands),
        "users": [*values.get("users", ()), *mine(values)],
        "names": values.get("names", []),
        "queues": values.get("queues", []),
        "states": values.get("states", []),
        "all": values.get("all", False),
        "signal": values.get("signal"),
        "main_only": values.get("main_only", False),
    }
    filters = [key for key in ("users", "names", "queues", "states") if request[key]]
    if not (request["ids"] or filters or request["all"]):
        raise UsageError("no jobs given", "for example: gcancel 42   or: gcancel -n sweep   or: gcancel --all")
    with connect() as client:
        check_names(client, values.get("users", []), request["queues"])
        if output.asks(values):
            _ask(client.call("POST", "/v1/jobs/cancel", {**request, "dry_run": True}))
        answer = client.call("POST", "/v1/jobs/cancel", request)
    if not output.show(values, answer, (*answer["cancelled"], *answer["signalled"])):
        for job_id in answer["ended"][:_TOLD]:
            output.note("gcancel", f"job {job_id} had already ended")
        if len(answer["ended"]) > _TOLD:
            output.note("gcancel", f"and {len(answer['ended']) - _TOLD} more")
    if answer["missing"]:
        done = "cancelled" if request["signal"] is None else "signalled"
        raise NotFound(_missing(answer, done), "list them with: gq -a")
    if filters and not (answer["cancelled"] or answer["signalled"]) and not values.get("json"):
        output.note("gcancel", "no job matches")
    return 0


def _missing(answer: dict[str, Any], done: str) -> str:
    """Which jobs do not exist, and what became of the others."""
    missing, has_ended = answer["missing"], bool(answer["ended"])
    text = f"there {'is' if len(missing) == 1 else 'are'} no {name_some('job', missing)}"
    if answer[done]:
        return f"{text}; the others were {done}" + (", or had already ended" if has_ended else "")
    return f"{text}; the others had already ended" if has_ended else f"{text}, and no other was {done}"


def _ask(preview: dict[str, Any]) -> None:
    ids = [*preview["cancelled"], *preview["signalled"]]
    if len(ids) < 2:
        return
    shown = ", ".join(map(str, ids[:10])) + (", ..." if len(ids) > 10 else "")
    output.confirm("gcancel", f"cancel {len(ids)} jobs ({shown})", "nothing was cancelled")
