"""Pause and resume queues: nothing new starts from a paused one; what runs goes on."""

from __future__ import annotations

from typing import Any

from gpusched.access import admins, manages
from gpusched.daemon.commit import AuditEvent, TickTransaction
from gpusched.daemon.verbs.table_setting import check_message
from gpusched.errors import Forbidden, NotFound, Refused
from gpusched.model.commands import PauseQueue
from gpusched.model.settings import Settings
from gpusched.model.table_settings import QueuePause, document_of_table
from gpusched.model.units import closest, printable
from gpusched.ports.tables import TABLE_SETTINGS


def apply(command: PauseQueue, tx: TickTransaction) -> dict[str, Any]:
    """Record the pause of a queue, or its end. Raises: UserError."""
    caller, name = command.caller, command.queue
    verb = "resume" if command.is_resumed else "pause"
    if not manages(caller, name, tx.settings):
        raise Forbidden(
            f"only an admin or an operator of queue {printable(name, 60)} may {verb} it, not {caller.user}",
            f"ask {admins(tx.settings)}",
        )
    key = QueuePause(name).key
    before = tx.state.rows[TABLE_SETTINGS].get(key)
    assert before is None or isinstance(before, QueuePause)
    if command.is_resumed:
        above = tx.state.pauses.of(name)
        if before is None and above is not None:
            text = f"queue {name} is paused with queue {above.queue} above it"
            raise Refused(text, f"resume that one: gctl queue resume {above.queue}")
        after = None
    else:
        if before is None:
            _check_exists(name, tx)
        check_message(command.message)
        after = QueuePause(name, caller.user, tx.now, command.message)
        if before is not None and command.message in ("", before.message):
            after = before
    if after != before:
        tx.set_in_table(key, after)
        tx.settings_record.append((caller, command.what, document_of_table(tx.state.rows[TABLE_SETTINGS])))
        tx.audit_events.append(AuditEvent(caller, verb, f"queue {name}"))
    return {"queue": name, "is_changed": after != before, "pause": after}


def _check_exists(name: str, tx: TickTransaction) -> None:
    """Refuse a queue that neither the settings nor any job names. Raises: NotFound."""
    known = _known(tx.settings) | {job.spec.queue for job in tx.state.jobs.values()}
    if name not in known:
        near = closest(name, known)
        raise NotFound(
            f"there is no queue {printable(name, 60)}",
            f"did you mean {near}?" if near else "list them with: gctl queue",
        )


def _known(settings: Settings) -> set[str]:
    return set(settings.queue) or {settings.default.queue}
