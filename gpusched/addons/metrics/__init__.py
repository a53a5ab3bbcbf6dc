"""`gpusched metrics`: the daemon's numbers for Prometheus, printed, in a file, or from a process that serves them."""

ENTRY_POINTS = {"command.metrics": "gpusched.addons.metrics.command:metrics"}
