"""Declare a node that does not answer down: its runs are lost, and must not continue when it comes back."""

from __future__ import annotations

from typing import Any

from gpusched.access import check_admin
from gpusched.daemon.commit import AuditEvent, TickTransaction
from gpusched.errors import NotFound, Refused
from gpusched.model.cluster import DrainCause, Drainer
from gpusched.model.commands import DeclareDown
from gpusched.model.job import JobEvent, Run
from gpusched.model.units import name_some, plural


def apply(command: DeclareDown, tx: TickTransaction) -> dict[str, Any]:
    check_admin(command.caller, "declare nodes down", tx.settings)
    lost = {name: runs_on(name, tx) for name in command.nodes}
    for name, runs in lost.items():
        _check(name, runs, tx)
    hit = {run.id: run for found in lost.values() for run in found}
    names = [tx.state.name_of(run.job_id) for run in hit.values()]
    if not command.is_confirmed:
        _ask(command.nodes, names)
    for name, found in lost.items():
        by = Drainer(command.caller.user, tx.now, command.message)
        tx.drain(name, f"declared down: {command.message}", DrainCause.DOWN, by)
        tx.audit_events.append(AuditEvent(command.caller, "down", name))
        text = f"{command.caller.user} declared node {name} down: {command.message}; what ran there is lost"
        tx.add_events(*(JobEvent(run.job_id, tx.now, "note", text, run.number) for run in found))
    return {"changed": list(lost), "lost": names}


def runs_on(name: str, tx: TickTransaction) -> list[Run]:
    """Open runs with a part on a node."""
    return [run for _, run in sorted(tx.state.open_runs.items()) if name in run.nodes]


def _check(name: str, runs: list[Run], tx: TickTransaction) -> None:
    views = {node.name: node for node in tx.nodes}
    node = views.get(name)
    if node is None and not runs:
        raise NotFound(f"{name!r} is not a node here ({', '.join(views)})", "list them with: ginfo")
    if name == tx.nodes[0].name:
        raise Refused(f"{name} is the daemon's own node, which is up", f"keep new work off it with: gctl drain {name}")
    if node is not None and not node.is_unreachable:
        raise Refused(
            f"node {name} answers, so it reports itself what becomes of its runs",
            f"keep new work off it with: gctl drain {name}; stop its jobs with: gctl requeue",
        )


def _ask(nodes: tuple[str, ...], jobs: list[str]) -> None:
    where = name_some("node", list(nodes))
    what = f"{plural(len(jobs), 'run')} on {where} would be lost ({name_some('job', jobs)})" if jobs else "nothing ran"
    raise Refused(
        f"{what if jobs else f'{what} on {where}'}; jobs that may be requeued start again elsewhere, while a node that "
        "is only out of reach still runs them",
        f"once it is certain that nothing runs there: gctl down {' '.join(nodes)} --confirm",
    )
