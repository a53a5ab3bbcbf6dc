"""Tickets, orders and events between the model's types and what the fork server and supervisors speak."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from gpusched.engine.remains import CHECKPOINT_VARIABLE, PROGRESS_VARIABLE, RUN_VARIABLE, SPOOL_VARIABLE
from gpusched.engine.spool import SUSPEND_LINE, checkpoint_path, progress_path
from gpusched.model.execution import (
    LimitOrder,
    NoteOrder,
    Order,
    ResumeOrder,
    RunEnded,
    RunResumed,
    RunStarted,
    RunStopping,
    RunSuspended,
    SignalOrder,
    StopOrder,
    SuspendOrder,
    Ticket,
)
from gpusched.model.value import asdict


def ticket_facts(ticket: Ticket, spool: str, pam: bool = False, cages: str | None = None) -> dict[str, Any]:
    """A ticket in built-in types. Its environment also says which run it is, by which its processes are found.

    Args: pam: whether a PAM session is opened; cages: the control group that the run's is made in; None: that of its
    supervisor's unit.
    """
    notice = ticket.notice
    foreground = ticket.interactive
    own = {
        RUN_VARIABLE: ticket.run,
        SPOOL_VARIABLE: spool,
        CHECKPOINT_VARIABLE: checkpoint_path(spool, ticket.run),
        PROGRESS_VARIABLE: progress_path(spool, ticket.run),
    }
    return {
        "run": ticket.run,
        "uid": ticket.uid,
        "user": ticket.user,
        "argv": ticket.argv,
        "script": ticket.script,
        "env": {**ticket.env, **own},
        "work_dir": ticket.work_dir,
        "umask": ticket.umask,
        "stdout_path": ticket.stdout_path,
        "stderr_path": ticket.stderr_path,
        "append": ticket.append,
        "time_limit_s": ticket.time_limit_s,
        "grace_s": ticket.grace_s,
        "leftover_grace_s": ticket.leftover_grace_s,
        "stop_signal": ticket.stop_signal if ticket.stop_signal is None else int(ticket.stop_signal),
        "notice": None if notice is None else (int(notice.signal), notice.before_s, notice.main_only),
        "snapshot": ticket.snapshot,
        "has_gpus": ticket.has_gpus,
        "interactive": None
        if foreground is None
        else {
            "pty": foreground.pty,
            "keep": foreground.keep,
            "lease_s": foreground.lease_s,
            "client": None
            if foreground.client is None
            else (foreground.client.pid, foreground.client.start_ticks, foreground.client.boot_id),
            "log_bytes": int(ticket.log_mib * (1 << 20)),
        },
        "checkpoint_dir": ticket.checkpoint_dir,
        "log_max_bytes": None if ticket.log_max_mib is None else ticket.log_max_mib << 20,
        "log_keep": ticket.log_keep,
        "pam": pam,
        "adopt": None if ticket.adopt is None else (ticket.adopt.pid, ticket.adopt.start_ticks),
        "cage": None if ticket.cage is None else {**asdict(ticket.cage), "folder": cages},
    }


def order_line(order: Order) -> str:
    """An order as a line of the order file; the lone dot at its end shows that it is whole."""
    if isinstance(order, StopOrder):
        number = "-" if order.signal is None else str(int(order.signal))
        return f"stop {order.why} {number} {'-' if order.grace_s is None else order.grace_s} ."
    if isinstance(order, SignalOrder):
        return f"signal {int(order.signal)} {'main' if order.main_only else 'tree'} ."
    if isinstance(order, SuspendOrder):
        return SUSPEND_LINE
    if isinstance(order, ResumeOrder):
        return "resume ."
    if isinstance(order, NoteOrder):
        return f"note {' '.join(order.text.split())} ."
    assert isinstance(order, LimitOrder)
    return f"limit {'-' if order.time_limit_s is None else order.time_limit_s} ."


def orders_from(lines: Iterable[str]) -> Iterator[StopOrder | LimitOrder | SuspendOrder | ResumeOrder]:
    """The lasting orders among lines of an order file; those torn by a crash are left out, as by supervisors."""
    for line in lines:
        words = line.split(" ")
        try:
            if words[-1] != ".":
                continue
            if words[0] == "stop":
                number = None if words[2] == "-" else int(words[2])
                yield StopOrder(words[1], number, None if words[3] == "-" else float(words[3]))
            elif words[0] == "limit":
                yield LimitOrder(None if words[1] == "-" else float(words[1]))
            elif line == SUSPEND_LINE:
                yield SuspendOrder()
            elif words[0] == "resume":
                yield ResumeOrder()
        except (ValueError, IndexError):
            continue


def event_from(facts: dict[str, Any]) -> RunStarted | RunStopping | RunSuspended | RunResumed | RunEnded:
    """An event of the pipe or a result. Raises: KeyError for a kind that supervisors do not send."""
    kind = facts.pop("event")
    if kind == "started":
        return RunStarted(**facts)
    if kind == "stopping":
        return RunStopping(**facts)
    if kind == "suspended":
        return RunSuspended(**facts)
    if kind == "resumed":
        return RunResumed(**facts)
    if kind != "ended":
        raise KeyError(kind)
    leftovers = facts.pop("leftovers")
    return RunEnded(**facts, leftovers=tuple(leftovers.split("\n")) if leftovers else ())
