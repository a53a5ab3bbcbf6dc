"""The simulator: replays a trace, or a lab's own history, through the daemon's planner on a virtual clock.

`trace` and `history` read jobs, `cluster` machines, `policies` settings; `planner_run` and `daemon_run` play them on
the clock of `event_loop` into an `outcome`, which `measures`, `occupancy` and `comparison` evaluate.
"""

ENTRY_POINTS = {
    "command.simulate": "gpusched.addons.simulate.commands:simulate",
    "command.pack": "gpusched.addons.simulate.commands:pack",
    "command.tune": "gpusched.addons.simulate.tune:tune",
    "command.debug": "gpusched.addons.simulate.debug:app",
    "command.replay": "gpusched.addons.simulate.commands:replay",
    "routes.simulate": "gpusched.addons.simulate.handler:ROUTES",
    "preset.auto": "gpusched.addons.simulate.auto_preset",
}
