"""Names of job states as bare texts: `states` imports too much for a command at the prompt."""

from __future__ import annotations

COMPACT = {
    "PENDING": "PD",
    "RUNNING": "R",
    "COMPLETING": "CG",
    "SUSPENDED": "S",
    "COMPLETED": "CD",
    "FAILED": "F",
    "CANCELLED": "CA",
    "TIMEOUT": "TO",
    "OUT_OF_MEMORY": "OOM",
    "NODE_FAIL": "NF",
    "PREEMPTED": "PR",
    "DEADLINE": "DL",
}
"""State -> Slurm's two-letter form, in the order of `JobState`."""
ACTIVE = ("PENDING", "RUNNING", "COMPLETING", "SUSPENDED")
FINAL = tuple(state for state in COMPACT if state not in ACTIVE)
