"""The simulator: a trace, or a lab's own history, through the policy that runs the machine, on a virtual clock.

`trace` reads what was submitted, `cluster` says on what machines, `runner` lets the time pass, `rules` names the
settings under which schedules are those of the literature.
"""
