"""The web page: a process without rights between browsers and the daemon's socket.

It knows no jobs and no users. Each page is drawn from the daemon's answers to a request that carries the session of the
browser, so that it shows what that user may see and nothing else.
"""

ENTRY_POINTS = {
    "command.web": "gpusched.addons.web.command:app",
}
