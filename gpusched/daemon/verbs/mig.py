"""Set the MIG layout of a card: recorded now, made as soon as the card is idle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpusched.access import check_admin
from gpusched.daemon.commit import AuditEvent, SettingEffect, TickTransaction
from gpusched.errors import Refused, UsageError
from gpusched.lifecycle.mig import current_layout, instances_of, processes_on, runs_on, wanting
from gpusched.lifecycle.mig import describe_process as told
from gpusched.model.cluster import GpuSample
from gpusched.model.commands import SetMigLayout
from gpusched.model.mentions import mention_jobs
from gpusched.model.mig import EXAMPLE, CardLayout, LayoutError, MigLayout, check_layout, parse_layout
from gpusched.model.states import JobState
from gpusched.model.units import gpu_label, printable
from gpusched.ports.tables import CALENDAR, MIG_LAYOUTS


def apply(command: SetMigLayout, tx: TickTransaction) -> dict[str, Any]:
    check_admin(command.caller, "change MIG layouts", tx.settings)
    absent = tx.state.rows[MIG_LAYOUTS].get(command.target)
    if command.layout is None and absent is not None and absent.uuid not in tx.samples:
        return _forget_absent(command, absent, tx)
    node, card, label = _card(command.target, tx)
    known = tx.state.rows[MIG_LAYOUTS].get(card.uuid)
    if command.layout is None:
        return _forget(command, label, card, known, tx)
    samples = tx.samples
    try:
        layout = parse_layout(command.layout)
        assert card.mig is not None
        check_layout(layout, card.mig.profiles, label)
    except LayoutError as error:
        raise UsageError(f"GPU {label}: {printable(str(error), 300)}", error.hint) from None
    if card.mig.why_not is not None:
        raise Refused(f"the layout of GPU {label} cannot be changed: {card.mig.why_not}", "see: gctl mig")
    before = current_layout(card, samples)
    if any("c." in name for name in before.profiles):
        raise Refused(
            f"GPU {label} has compute instances that are smaller than their GPU instance ({before}); they could not be "
            "made again if the change failed",
            f"remove them first: nvidia-smi mig -i {card.index} -dci",
        )
    reserved = _reservations(card, samples, tx)
    if reserved:
        raise Refused(
            f"GPU {label} or a part of it is reserved by name: {', '.join(reserved)}",
            f"delete the reservation first: gctl unreserve {reserved[0]}",
        )
    runs = (*tx.state.open_runs.values(), *tx.state.releasing.values())
    held = runs_on(node, card, samples, runs)
    if not held:
        _check_foreign(label, card, samples)
    jobs = {run.job_id: tx.state.jobs[run.job_id] for run in held}
    is_pending = known is not None and known.wanted is not None
    is_same = layout == (known.wanted if known is not None and is_pending else before)
    plan = {
        "gpu": label,
        "uuid": card.uuid,
        "before": str(before),
        "after": str(layout),
        "is_changed": not is_same,
        "is_pending": is_pending,
        "waits_for": [{"job": tx.state.name_of(job_id), "user": job.user} for job_id, job in sorted(jobs.items())],
        "notes": [] if is_same else _notes(card, before, layout, tx),
    }
    if command.dry_run or (is_same and known is not None and layout in (known.wanted, known.made)):
        return plan
    is_called_off = is_pending and layout == before and bool(held)
    if is_same or is_called_off:
        # A card with jobs was never ordered to change, since none starts there meanwhile: it takes jobs again at once.
        tx.put_mig_layout(CardLayout(card.uuid, node, card.index, made=layout, user=command.caller.user, at=tx.now))
    else:
        tx.put_mig_layout(wanting(known, card, node, layout, before, command.caller.user, tx.now))
    if not is_same:
        told_before = str(known.wanted if known is not None and is_pending else before)
        what = f"gctl mig set {label} {layout}"
        tx.effects.append(SettingEffect(command.caller, what, f"MIG layout of {label}", told_before, str(layout)))
    tx.audit_events.append(AuditEvent(command.caller, f"set the MIG layout {layout} of", f"GPU {label}"))
    return plan


def _card(target: str, tx: TickTransaction) -> tuple[str, GpuSample, str]:
    """Node, newest sample and name of a card that can do MIG. Raises: UsageError, NotFound, Refused."""
    uuid = tx.resolve_device(target)
    for node in tx.nodes:
        for view in node.gpus:
            if view.uuid != uuid:
                continue
            label = f"{node.name}:{gpu_label(view.index)}"
            if view.mig_parent is not None:
                card = label.rpartition(":")[0]
                raise UsageError(f"{label} is a MIG instance, not a card", f"name its card: gctl mig set {card} LAYOUT")
            sample = tx.samples.get(uuid)
            if sample is None:
                raise Refused(f"GPU {label} cannot be read now", "see why with: ginfo")
            if sample.mig is None:
                raise Refused(f"GPU {label} ({view.name}) cannot do MIG", "see the cards that can with: gctl mig")
            return node.name, sample, label
    raise UsageError(f"{printable(target, 60)!r} is a node, not a GPU", EXAMPLE)


def _forget(
    command: SetMigLayout, label: str, card: GpuSample, known: CardLayout | None, tx: TickTransaction
) -> dict[str, Any]:
    current = str(current_layout(card, tx.samples))
    if known is not None and known.wanted is not None:
        raise Refused(
            f"GPU {label} is about to get the layout {known.wanted}",
            f"to keep what it has instead: gctl mig set {label} {current}",
        )
    if known is not None and not command.dry_run:
        tx.forget_mig_layout(card.uuid)
        tx.audit_events.append(AuditEvent(command.caller, "forget the MIG layout of", f"GPU {label}"))
        what = f"gctl mig forget {label}"
        made = None if known.made is None else str(known.made)
        tx.effects.append(SettingEffect(command.caller, what, f"MIG layout of {label}", made, None))
    return {
        "gpu": label,
        "uuid": card.uuid,
        "before": current,
        "after": current,
        "is_changed": known is not None,
        "is_pending": False,
        "waits_for": [],
        "notes": [],
    }


def _forget_absent(command: SetMigLayout, known: CardLayout, tx: TickTransaction) -> dict[str, Any]:
    """Forget what was set for a card that was taken out, or whose node is off: nothing is there to wait for."""
    label = f"{known.node}:{gpu_label(known.index)}"
    if not command.dry_run:
        tx.forget_mig_layout(known.uuid)
        tx.audit_events.append(AuditEvent(command.caller, "forget the MIG layout of", f"GPU {label}"))
    shown = str(known.wanted or known.made or "unknown")
    plan = {"gpu": label, "uuid": known.uuid, "before": shown, "after": shown}
    return {**plan, "is_changed": True, "is_pending": False, "waits_for": [], "notes": []}


def _check_foreign(label: str, card: GpuSample, samples: Mapping[str, GpuSample]) -> None:
    processes = processes_on(card, samples)
    if processes is None:
        raise Refused(
            f"the driver does not list the processes on GPU {label}, so it is never known to be idle",
            "run the daemon where it sees them: on the host, as root",
        )
    if processes:
        others = f" and {len(processes) - 1} more" if len(processes) > 1 else ""
        raise Refused(
            f"GPU {label} is used by {told(processes[0])}{others}, without a job; its layout can change only when "
            "nothing uses it",
            "end it, or see whose it is with: ginfo --foreign",
        )


def _reservations(card: GpuSample, samples: Mapping[str, GpuSample], tx: TickTransaction) -> list[str]:
    uuids = {card.uuid, *(sample.uuid for sample in instances_of(card.uuid, samples))}
    return [
        name
        for name, entry in sorted(tx.state.rows[CALENDAR].items())
        if any(share.uuid in uuids for place in entry.held for share in place.gpus)
    ]


def _notes(card: GpuSample, before: MigLayout, layout: MigLayout, tx: TickTransaction) -> list[str]:
    """What an admin should know before the change."""
    notes = []
    if card.mig is not None and card.mig.needs_reset and layout.is_on is not before.is_on:
        notes.append(
            "the driver resets this card to switch MIG on or off: no program may have it open, not even a monitor such "
            "as DCGM; where it cannot be reset, the change is given up, and says what to do"
        )
    if layout.is_on and not layout.profiles:
        notes.append("no job can use the card until it is divided")
    gone = set(before.profiles) - set(layout.profiles)
    gone -= {sample.mig_profile for sample in tx.samples.values() if sample.mig_parent not in (None, card.uuid)}
    stranded = [
        tx.state.name_of(job.id)
        for job in tx.state.jobs.values()
        if job.state is JobState.PENDING and job.spec.request.gpu_type in gone
    ]
    if stranded:
        them = mention_jobs(stranded)
        notes.append(f"{them} asked for {', '.join(sorted(gone))}, which no GPU will have: they will not start")
    return notes
