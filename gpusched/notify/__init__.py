"""Alerts: the user's own targets, and the processes that send.

targets    the user's `notify.toml` and templates, with file and line of what is wrong
attempt    one try to reach one target, in a process of its own that can be ended
terminals  a user's own terminals and mail, which need no service
sender     the process that sends one batch as that user: to whom, in which order, and when again
courier    the daemon's end of it

A target that fails or hangs delays nothing else: the daemon hands alerts over and never waits.
"""
