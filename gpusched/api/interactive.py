"""Checks the parts of a submission that concern its foreground."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpusched.errors import UsageError
from gpusched.model.job import Interactive, JobSpec, Request, RetryRule
from gpusched.model.settings import Settings
from gpusched.model.spec import FIELDS
from gpusched.model.value import replace

if TYPE_CHECKING:
    from gpusched.daemon.facade import DaemonFacade


def read_interactive(
    values: Mapping[str, Any], request: Request, retry: RetryRule, settings: Settings
) -> tuple[Interactive | None, RetryRule]:
    """The foreground and its retry rule: no client would be attached to a second run. Raises: UsageError."""
    kind = values.get("interactive")
    if kind is None:
        for name in ("keep", "lease_s"):
            if values.get(name):
                raise UsageError(f"{name} is only for a job in the foreground", "start one with: grun COMMAND")
        return None, retry
    for name, field in FIELDS.items():
        if field.background_only and values.get(name) is not None:
            raise UsageError(
                f"a job in the foreground has no {field.background_only}", "submit it to the background with: gsub"
            )
    if retry.retries:
        raise UsageError(
            f"{retry.retries} retries are requested, but a job in the foreground runs once",
            "submit it to the background with: gsub",
        )
    lease_s = values.get("lease_s", settings.interactive.lease_s if request.gpus else 0)
    found = Interactive(pty=kind == "pty", keep=bool(values.get("keep")), lease_s=lease_s or None)
    return found, replace(retry, requeue=False)


def submitted_by(specs: Sequence[JobSpec], pid: int | None, daemon: DaemonFacade) -> tuple[JobSpec, ...]:
    """The specs, foreground ones with the submitting process; unchanged if the process is not visible."""
    if pid is None or all(spec.interactive is None for spec in specs):
        return tuple(specs)
    client = daemon.client_process(pid)
    return tuple(
        spec if spec.interactive is None else replace(spec, interactive=replace(spec.interactive, client=client))
        for spec in specs
    )
