"""Client commands and their effects on the daemon's memory: one file per verb.

The API builds commands from requests and hands them to the tick, which applies them all before one commit. A
verb changes nothing outside the transaction it is given and refuses by raising UserError; its return value is
sent only after the commit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpusched import entry_points
from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.verbs import (
    adopt,
    batch,
    cancel,
    down,
    drain,
    enter,
    hold,
    mig,
    pause,
    pipeline,
    requeue,
    reserve,
    step,
    submit,
    suspend,
    table_setting,
    update,
)
from gpusched.model import commands
from gpusched.model.commands import Command

_APPLY: dict[type, Callable[[Any, TickTransaction], dict[str, Any]]] = {
    commands.Submit: submit.apply,
    commands.SubmitBatch: batch.apply,
    commands.Cancel: cancel.apply,
    commands.LoseClients: cancel.lose_clients,
    commands.Hold: hold.apply,
    commands.Release: hold.apply,
    commands.Update: update.apply,
    commands.Suspend: suspend.suspend,
    commands.Resume: suspend.resume,
    commands.Requeue: requeue.apply,
    commands.Drain: drain.apply,
    commands.DeclareDown: down.apply,
    commands.SetMigLayout: mig.apply,
    commands.Reserve: reserve.apply,
    commands.Unreserve: reserve.apply,
    commands.SubmitPipeline: pipeline.submit,
    commands.ResumePipeline: pipeline.resume,
    commands.Adopt: adopt.apply,
    commands.LoseSteps: step.lose,
    commands.EnterJob: enter.apply,
    commands.GiveCredit: table_setting.give_credit,
    commands.SetUserLimit: table_setting.set_limit,
    commands.ChangeMembers: table_setting.change_members,
    commands.PauseQueue: pause.apply,
    commands.UndoTableSettings: table_setting.undo,
}


def apply(command: Command, tx: TickTransaction) -> dict[str, Any]:
    """Apply one command. Raises: UserError, with nothing of this command applied."""
    kind = type(command)
    verb = _APPLY[kind] if kind in _APPLY else entry_points.find(f"verb.{kind.__name__}")
    assert verb is not None
    return verb(command, tx)
