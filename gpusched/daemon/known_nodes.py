"""What other nodes were like when they last reported, kept in a file for the time after a restart of the daemon.

A node that does not answer then keeps its size and its GPUs, so that runs there hold what they booked, and jobs that
fit there only wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from logging import getLogger

from gpusched.engine.remote.messages import NodeReport
from gpusched.model.value import Value, decode, encode, replace
from gpusched.paths import replace_file

log = getLogger("gpusched.daemon")


class KnownNode(Value):
    """The last report of a node that differed in more than its load."""

    boot_id: str
    report: NodeReport


class _File(Value):
    nodes: dict[str, KnownNode]


class KnownNodes:
    """The file. Args: path: None: nothing is kept. members: nodes of the cluster; others are forgotten."""

    def __init__(self, path: str | None, members: Iterable[str]) -> None:
        self._path = path
        self._is_changed = False
        found = {} if path is None else _read(path)
        self.nodes = {name: found[name] for name in members if name in found}

    def note(self, name: str, boot_id: str, report: NodeReport) -> None:
        """Take in a report; the file is written by `save`."""
        known = KnownNode(boot_id, _without_load(report, self.nodes.get(name)))
        before = self.nodes.get(name)
        if before is None or before.boot_id != boot_id or _shape(before.report) != _shape(known.report):
            self.nodes[name] = known
            self._is_changed = True

    def save(self) -> None:
        """Write the file if a node has changed."""
        if not self._is_changed or self._path is None:
            return
        self._is_changed = False
        try:
            replace_file(self._path, encode(_File(self.nodes)))
        except OSError as error:
            log.warning("what is known of nodes cannot be saved in %s: %s", self._path, error.strerror)


def _read(path: str) -> dict[str, KnownNode]:
    try:
        with open(path, "rb") as file:
            return decode(file.read(), _File).nodes
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        # Of another version, for example: the nodes tell again.
        log.warning("what was known of nodes cannot be read from %s: %s", path, error)
        return {}


def _without_load(report: NodeReport, before: KnownNode | None) -> NodeReport:
    reading = report.gpus
    if reading is None or reading.error is not None:
        reading = None if before is None else before.report.gpus
    else:
        cards = (
            replace(gpu, processes=None, openers=(), xids=(), vram_used_mib=None, utilisation=None)
            for gpu in reading.gpus
        )
        reading = replace(reading, gpus=tuple(cards))
    return replace(report, gpus=reading, owners={}, checkpoints={}, cpu_seconds={})


def _shape(report: NodeReport) -> tuple[object, ...]:
    host, reading = report.host, report.gpus
    cards = None if reading is None else [(gpu.uuid, gpu.index, gpu.name, gpu.vram_total_mib) for gpu in reading.gpus]
    size = None if host is None else (host.cpus, host.mem_total_mib)
    return size, cards, report.site, report.settings, report.isolation, report.processors
