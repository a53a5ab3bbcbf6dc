"""Alerts: the user's own targets, and the processes that send.

targets    the user's `notify.toml` and templates; errors with file and line
attempt    one attempt to reach one target, in a process that can be killed
terminals  a user's own terminals and mail, which need no service
sender     the process that sends one batch as that user: recipients, order and retries
courier    the daemon's end of it

A target that fails or hangs delays nothing else: the daemon hands alerts over and never waits.
"""

ENTRY_POINTS = {
    "alert.courier": "gpusched.addons.notify.courier:courier_of",
    "command.notify": "gpusched.addons.notify.command:app",
    "alert.targets": "gpusched.addons.notify.own_targets",
}
