"""Telling people: what their own file says, and the process that sends.

targets    the user's `notify.toml`: targets, events, templates, with file and line of what is wrong
words      templates and the facts in them
sending    one try to reach one target, in a process of its own that can be ended
batch      what one sender has to send, to whom, in which order
sender     the process that sends one batch; run as that user
courier    the daemon's end of it

A target that fails or hangs costs nobody else anything: the daemon hands alerts over and never waits.
"""
