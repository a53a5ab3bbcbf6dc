"""Brings cards to the MIG layouts that were set for them.

All of it follows from the committed records and the newest readings, so nothing is lost with a killed daemon: a layout
that was not made yet is ordered again, and one that a reboot took away is set again at the first reading after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from logging import getLogger

from gpusched.daemon.commit import SettingEffect, TickTransaction
from gpusched.daemon.nodes import ClusterNode, ClusterNodes
from gpusched.daemon.state import DaemonState
from gpusched.daemon.watches import Stage, Watch
from gpusched.lifecycle.alerts import AdminEvent
from gpusched.lifecycle.mig import current_layout, order_for, settled, wanting, why_not_idle
from gpusched.model.cluster import GpuSample
from gpusched.model.commands import Caller
from gpusched.model.mig import CardLayout, MigOrder
from gpusched.model.units import gpu_label
from gpusched.ports.tables import MIG_LAYOUTS

log = getLogger("gpusched.daemon")

_DAEMON = Caller(0, "gpusched")


class MigWatch(Watch):
    """Follows the layouts of all nodes."""

    name = "MIG layouts"
    stage = Stage.BEFORE_COMMANDS

    def __init__(self, cluster: ClusterNodes) -> None:
        self._cluster = cluster
        self._checked: dict[str, str] = {}
        """Boot of each node after which its layouts were compared with those that were made."""

    def orders(self, node: ClusterNode, state: DaemonState) -> tuple[MigOrder, ...]:
        """Orders for the idle cards of a node that are to get another layout. Only for a memory that is committed."""
        samples = _readable(node)
        return tuple(
            order_for(one)
            for one in _of(node, state)
            if one.wanted is not None and one.uuid in samples and why_waits(one, node, state) is None
        )

    def carry_out(self, tx: TickTransaction) -> None:
        """Record what the newest readings say of the wanted layouts, and set those again that a reboot took away."""
        if not tx.state.rows[MIG_LAYOUTS]:
            return
        for node in self._cluster:
            samples = _readable(node)
            if not samples:
                continue
            is_new = self._checked.get(node.name) != node.boot_id
            is_missing = False
            for one in _of(node, tx.state):
                card = samples.get(one.uuid)
                if card is None or card.is_lost or card.error is not None:
                    continue
                after = settled(one, card)
                if after is not one:
                    self._settle(after, tx)
                elif is_new and one.wanted is None and one.made is not None:
                    now = current_layout(card, samples)
                    if now != one.made:
                        is_missing = True
                        tx.put_mig_layout(wanting(one, card, node.name, one.made, now, one.user, tx.now))
                        text = f"GPU {_label(one)} has lost its MIG layout {one.made}: making it again"
                        log.info("%s", text)
                        name = f"MIG layout of {_label(one)}"
                        tx.effects.append(SettingEffect(_DAEMON, text, name, str(now), str(one.made)))
            if is_new and not is_missing:
                self._checked[node.name] = node.boot_id

    def _settle(self, after: CardLayout, tx: TickTransaction) -> None:
        tx.put_mig_layout(after)
        where = _label(after)
        if after.failure is None:
            log.info("GPU %s has the MIG layout %s", where, after.made)
            return
        text = f"the MIG layout of GPU {where} was not changed: {after.failure}"
        log.error("%s", text)
        tx.news.append(AdminEvent("mig_failed", text, after.node, after.uuid))
        tx.effects.append(SettingEffect(_DAEMON, text, f"MIG layout of {where}", None, None))


def why_waits(layout: CardLayout, node: ClusterNode, state: DaemonState) -> str | None:
    """Why a wanted layout is not being made now, as a clause; None if nothing keeps it."""
    samples = _readable(node)
    card = samples.get(layout.uuid)
    if card is None:
        return node.why_not or "the card cannot be read"
    names = {run.id: state.name_of(run.job_id) for run in (*state.open_runs.values(), *state.releasing.values())}
    return why_not_idle(node.name, card, samples, (*state.open_runs.values(), *state.releasing.values()), names)


def _of(node: ClusterNode, state: DaemonState) -> list[CardLayout]:
    return [one for one in state.rows[MIG_LAYOUTS].values() if one.node == node.name]


def _readable(node: ClusterNode) -> Mapping[str, GpuSample]:
    reading = node.reading
    if node.why_not is not None or reading is None or reading.error is not None:
        return {}
    return node.samples


def _label(layout: CardLayout) -> str:
    return f"{layout.node}:{gpu_label(layout.index)}"
