"""What the core's `config` finds of `[web]` that has no effect."""

from __future__ import annotations

from gpusched.addons.web.settings import web_settings
from gpusched.config.without_effect import Rule

RULES = (
    Rule(
        "web",
        ("user_header",),
        lambda settings: bool(web_settings(settings).proxy_users),
        "without proxy_users no proxy may name a user",
        'set proxy_users = ["www-data"] in [web], or leave it out',
    ),
    Rule(
        "web",
        ("proxy_users",),
        lambda settings: web_settings(settings).user_header is not None,
        "without user_header no proxy names a user",
        'set user_header = "X-Remote-User" in [web], or leave it out',
    ),
)
