"""Warnings about alerts without a reachable target, and `gpusched notify`."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpusched.errors import UserError


def warn_about_targets(command: str, named: Sequence[str]) -> None:
    """Warn on stderr if the user requests alerts that cannot be delivered.

    Args: named: the requested targets; empty for all.
    """
    from gpusched import paths
    from gpusched.addons.notify.targets import TargetsError, read_targets
    from gpusched.cli import output
    from gpusched.model.units import printable

    try:
        found = read_targets(paths.notify_file(), _site_mail() if any("@" in name for name in named) else None)
    except TargetsError as error:
        output.note(command, f"no alerts will be sent until this is fixed: {error.message}")
        return
    if not found.exists and not any("@" in name for name in named):
        file = printable(found.file)
        output.note(command, f"there is no {file}, so no alerts will be sent; create it as in docs/howto/alerts.md")
        return
    if not named and not found.targets:
        output.note(command, f"no alerts will be sent: {printable(found.why_no_target())}")
    for name in named:
        if found.named(name) is None:
            output.note(command, f"{printable(name)} will get no alerts: {printable(found.why_no_target(name))}")


def _site_mail() -> str | None:
    """The site's mail server."""
    import os

    from gpusched import paths
    from gpusched.config import load_settings
    from gpusched.errors import UserError

    try:
        return load_settings(paths.config_file(), os.environ).settings.alert.mail
    except (UserError, OSError):
        # The daemon's configuration is no concern of this command's.
        return None


def problems_in_targets() -> list[UserError]:
    """Problems in the user's notify.toml, with file and line; empty if there are none."""
    from gpusched import paths
    from gpusched.addons.notify.attempt import understands, without_apprise
    from gpusched.addons.notify.targets import HINT, TargetsError, is_open_to_others, read_targets
    from gpusched.errors import UsageError

    file = paths.notify_file()
    try:
        found = read_targets(file)
    except TargetsError as error:
        return list(error.problems)
    problems: list[UserError] = []
    if found.exists and is_open_to_others(file):
        problems.append(UsageError(f"file {file} holds secrets and is readable by others", f"chmod 600 {file}"))
    for target in found.targets.values():
        known = understands(target.url)
        if known is None:
            problems.append(UsageError(f"file {file}: no alerts can be sent: {without_apprise()}", HINT))
            break
        if not known:
            scheme = target.url.partition("://")[0]
            text = f"file {file}: no service understands the address {scheme}://... of target {target.name}"
            problems.append(UsageError(text, "see what apprise knows, with: apprise --details"))
    return problems


def send_test(wanted: str | None) -> list[dict[str, object]]:
    """Send a test message to one target or to all, directly from this process; returns the outcome for each.

    Raises: UserError if there is no target.
    """
    import os
    import time

    from gpusched import paths
    from gpusched.access import user_name
    from gpusched.addons.notify.attempt import SendAttempt
    from gpusched.addons.notify.targets import default_texts, fill, read_targets
    from gpusched.config import load_settings
    from gpusched.errors import NotFound, Refused

    file = paths.notify_file()
    limits = load_settings(paths.config_file(), os.environ).settings.alert
    found = read_targets(file, limits.mail)
    chosen = list(found.targets.values())
    if wanted is not None:
        one = found.named(wanted)
        if one is None:
            names = ", ".join(found.targets) or "none"
            raise NotFound(f"{file} has no target {wanted}", f"targets are: {names}")
        chosen = [one]
    if not chosen:
        raise Refused(f"{file} names no target" if found.exists else f"there is no {file}", "see docs/howto/alerts.md")
    user = user_name(os.geteuid())
    facts: dict[str, str | float] = {"event": "test", "user": user, "at": time.time(), "node": os.uname().nodename}
    facts["message"] = f"This is a test, sent by {user} on {facts['node']} with: gpusched notify test"
    title, body = (fill(text, facts) for text in default_texts("test"))
    under_way = [(target.name, SendAttempt(target.url, title, body, limits.timeout_s)) for target in chosen]
    results = [(name, attempt.wait()) for name, attempt in under_way]
    return [{"target": name, "told": result.is_told, "error": result.error or None} for name, result in results]
