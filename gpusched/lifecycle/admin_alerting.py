"""What the administrator is told, and when that is enough.

A card that comes and goes, or a daemon that dies again and again, would fill a mailbox: of the same thing so many
alerts an hour are told, and the last of them says that it is the last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpusched.lifecycle.blame import WAS_LOST
from gpusched.model.alerts import Alert
from gpusched.model.cluster import SUSPECT, NodeView
from gpusched.model.units import gpu_label

QUIET_S = 3600.0
MOST_IN_QUIET = 3


@dataclass(frozen=True, slots=True)
class News:
    """Something for the administrator."""

    event: str
    """A word of ADMIN_EVENTS."""
    message: str
    node: str
    about: str = ""
    """UUID of the GPU when it is about one: each has its own measure."""

    @property
    def mark(self) -> str:
        """What the keys of all alerts about the same thing begin with."""
        return " ".join(word for word in (self.event, self.node, self.about) if word) + " @"


def admin_alert(news: News, now: float, uid: int, targets: tuple[str, ...], before: Iterable[Alert]) -> Alert | None:
    """The row of the outbox; None when nobody is to be told, or enough was told of the same thing.

    Args: before: alerts that wait or were told, whichever.
    """
    if not targets:
        return None
    count = sum(1 for one in before if one.key.startswith(news.mark) and one.at > now - QUIET_S)
    if count >= MOST_IN_QUIET:
        return None
    is_last = count == MOST_IN_QUIET - 1
    message = news.message + ("; should it go on, nothing more is told of it for an hour" if is_last else "")
    return Alert(
        key=f"{news.mark}{now:.3f}",
        event=news.event,
        counts_as=(news.event,),
        uid=uid,
        at=now,
        facts=(("event", news.event), ("message", message), ("at", now), ("node", news.node)),
        targets=targets,
    )


def is_over(alert: Alert, now: float) -> bool:
    """Whether a told alert of the administrator need not be remembered any more."""
    return alert.job_id is None and alert.state == "told" and alert.at <= now - QUIET_S


def news_of_drain(drained: str, message: str, nodes: Iterable[NodeView]) -> News | None:
    """What is told of a node or GPU that was taken out, by a person or because it is suspect.

    None for a lost one: that is told when it is seen.
    """
    if message.startswith(f"{SUSPECT}{WAS_LOST}"):
        return None
    for node in nodes:
        for gpu in node.gpus:
            if gpu.uuid == drained:
                name = f"GPU {gpu_label(gpu.index)} ({gpu.name}, {gpu.uuid})"
                if message.startswith(SUSPECT):
                    return News(
                        "gpu_suspect", f"{name} is suspect: {message.removeprefix(SUSPECT)}", node.name, gpu.uuid
                    )
                return News("gpu_drained", f"{name} was drained: {message}", node.name, gpu.uuid)
    return News("gpu_drained", f"{drained} was drained: {message}", drained)
