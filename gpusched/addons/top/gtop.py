"""gtop: the cards and the queue, live."""

from __future__ import annotations

import sys

from gpusched.cli import output
from gpusched.cli.options import gtop_table
from gpusched.cli.sparklines import draws_blocks
from gpusched.client import connect
from gpusched.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


@output.command(gtop_table)
def body(values: dict[str, Any], operands: list[str]) -> int:
    from gpusched.addons.board.query import EXAMPLE, SORTS, parse_filter  # takes regular expressions

    filtered = " ".join(operands)
    try:
        parse_filter(filtered)
    except ValueError as error:
        raise UsageError(str(error), EXAMPLE) from None
    if not (sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()):
        raise UsageError("gtop needs a terminal", "in a pipe use: gq, ginfo")
    # Errors of the first connection are printed before the screen is taken.
    with connect() as client:
        client.call("GET", "/v1/board?limit=1")
        path = client.socket_path
    from gpusched.addons.top.app import run  # textual takes a third of a second
    from gpusched.addons.top.state import TopState

    state = TopState(
        filter=filtered,
        is_mine=bool(values.get("me")),
        sort=values.get("sort", SORTS[0]),
        is_ascii=bool(values.get("ascii")) or not draws_blocks(),
        is_read_only=bool(values.get("readonly")),
    )
    return run(state, path)
