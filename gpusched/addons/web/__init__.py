"""The web page: a process without rights between browsers and the daemon's socket.

It knows no jobs and no users. Each page is drawn from the daemon's answers to a request that carries the session of the
browser, so that it shows what that user may see and nothing else.

    door       in the daemon: for whom a request of the web process counts, by `sessions` and `tokens`
    routes     in the daemon: signing in, and tokens for programs
"""

ENTRY_POINTS = {
    "command.web": "gpusched.addons.web.command:app",
    "settings.web": "gpusched.addons.web.settings:WebSettings",
    "without_effect.web": "gpusched.addons.web.checks:RULES",
    "api.door": "gpusched.addons.web.door:WebDoor",
    "routes.web": "gpusched.addons.web.routes:ROUTES",
}
