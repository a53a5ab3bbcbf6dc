"""Drain nodes and GPUs, and undrain them."""

from __future__ import annotations

from typing import Any

from gpusched.access import check_admin
from gpusched.daemon.commit import AuditEvent, TickTransaction
from gpusched.model.cluster import Clearance, DrainCause, Drainer
from gpusched.model.commands import Drain
from gpusched.model.units import gpu_label


def apply(command: Drain, tx: TickTransaction) -> dict[str, Any]:
    check_admin(command.caller, "drain and undrain nodes and GPUs", tx.settings)
    changed: list[str] = []
    unchanged: list[str] = []
    for target in command.targets:
        name = tx.resolve_device(target)
        is_change = True
        if command.message is None:
            is_change = tx.undrain(name)
            for gpu in [gpu for node in tx.nodes for gpu in node.gpus if gpu.uuid == name]:
                is_change = is_change or gpu.is_suspect
                # Errors counted so far no longer count against the GPU.
                tx.clear(Clearance(gpu.uuid, tx.now, gpu.ecc_errors))
        else:
            tx.drain(name, command.message, DrainCause.ADMIN, Drainer(command.caller.user, tx.now))
        (changed if is_change else unchanged).append(name)
        tx.audit_events.append(AuditEvent(command.caller, "undrain" if command.message is None else "drain", name))
    is_alone = len(tx.nodes) == 1
    labels = {
        gpu.uuid: f"GPU {gpu_label(gpu.index)}" if is_alone else f"GPU {node.name}:{gpu_label(gpu.index)}"
        for node in tx.nodes
        for gpu in node.gpus
    }
    labels = {name: label for name, label in labels.items() if name in changed or name in unchanged}
    return {"changed": changed, "unchanged": unchanged, "labels": labels}
