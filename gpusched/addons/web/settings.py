"""`[web]` of the config file; see `model.settings` for how settings are declared. The core's `config` reads it."""

from __future__ import annotations

from typing import Annotated

from gpusched.model.rules import NAMES, WORD, SomeOf
from gpusched.model.settings import Settings
from gpusched.model.value import Value

CONTROL, SUBMIT = "control", "submit"
"""Scope of a session of the web page: to cancel, hold and release jobs."""


class WebSettings(Value):
    """The web page (`gpusched web`). What it shows each user follows from [access], as everywhere."""

    user: Annotated[str, WORD] = "gpusched-web"
    """Account of the web process of a system scheduler: it alone may sign users in, and passes on their requests. The
    page of a personal scheduler runs as its owner."""
    allow: Annotated[tuple[str, ...], SomeOf((CONTROL, SUBMIT))] = ()
    """What the web process of a system scheduler may change: `control` lets users cancel, hold and release jobs there,
    and tokens of that scope do so; `submit` lets tokens of that scope submit jobs. The web process must be started with
    --allow, too."""
    user_header: Annotated[str | None, WORD] = None
    """Header in which a reverse proxy names the user, such as `X-Remote-User`. The daemon then believes the web process
    who its users are; without it, users sign in with a code. Only for a system scheduler."""
    proxy_users: Annotated[tuple[str, ...], NAMES] = ()
    """Accounts of reverse proxies whose `user_header` counts, such as `www-data`; checked on the Unix socket."""


def web_settings(settings: Settings) -> WebSettings:
    """The section of these settings; with defaults where the file has none."""
    found: WebSettings = settings.of_add_ons.get("web") or WebSettings()
    return found
