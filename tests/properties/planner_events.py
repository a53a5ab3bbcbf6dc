"""What happens in a generated world, in the words of the planner."""

from __future__ import annotations

from worlds import World

from gpusched.scheduler import events
from gpusched.scheduler.planner import Planner
from gpusched.scheduler.state import PlannerState


def planner_of(world: World) -> Planner:
    """A planner that knows nothing but the nodes."""
    planner = Planner(PlannerState(world.nodes, world.settings, world.extensions))
    planner.state.apply(events.BudgetsChanged(world.budgets))
    return planner


def apply_events(planner: Planner, world: World) -> None:
    """Tell the planner what has happened since it was last told."""
    for name, what in world.take_events():
        if name == "RunStarted":
            planner.state.apply(events.RunHolds(what[3]))
        elif name == "RunChanged":
            planner.state.apply(events.RunChanged(what[1]))
        elif name == "RunEnded":
            planner.state.apply(events.RunReleased(what[0], is_charged=True))
        elif name == "SettingsChanged":
            planner.state.apply(events.SettingsChanged(what[0], world.extensions))
        else:
            planner.state.apply(getattr(events, name)(*what))
