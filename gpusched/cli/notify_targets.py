"""What is wrong with the targets of the user's alerts, which an add-on reads."""

from __future__ import annotations

from gpusched import entry_points

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpusched.errors import UserError

_WHAT = "sending alerts"


def warn_about_targets(command: str, named: Sequence[str]) -> None:
    """Warn on stderr if the user requests alerts that cannot be delivered.

    Args: named: the requested targets; empty for all.
    """
    targets = entry_points.find("alert.targets")
    if targets is not None:
        targets.warn_about_targets(command, named)
        return
    from gpusched.cli import output

    missing = entry_points.absent("notify", _WHAT)
    output.note(command, f"no alerts will be sent: {missing.message}; {missing.hint}")


def problems_in_targets() -> Sequence[UserError]:
    """Problems in the user's notify.toml, with file and line; empty if there are none."""
    targets = entry_points.find("alert.targets")
    found: Sequence[UserError] = () if targets is None else targets.problems_in_targets()
    return found
