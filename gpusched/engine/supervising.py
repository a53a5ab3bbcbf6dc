"""Which kind of supervisor a run has."""

from __future__ import annotations

from gpusched.engine.supervisor import Home, Supervisor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def supervisor_of(ticket: dict[str, Any], home: Home) -> Supervisor:
    """Who supervises the run of this ticket."""
    if ticket.get("adopt") is None:
        return Supervisor(ticket, home)
    from gpusched.engine.adopted import AdoptedSupervisor  # hardly any run needs it

    return AdoptedSupervisor(ticket, home)
