"""Which GPUs have become worth a word to the administrator since the last look."""

from __future__ import annotations

from collections.abc import Iterator

from gpusched.gpu.tracker import GpuTracker
from gpusched.lifecycle.admin_alerting import News
from gpusched.model.cluster import SUSPECT, GpuReading, GpuState
from gpusched.model.units import gpu_label

_EVENTS = {GpuState.LOST: "gpu_lost", GpuState.SUSPECT: "gpu_suspect"}
_UNREADABLE_AFTER = 3
"""Readings in a row that fail as a whole before anybody is told: one may just have come too late."""


class GpuWatch:
    """Compares the state of each card with the one before. What is wrong at the first look is told then."""

    def __init__(self) -> None:
        self._bad: dict[str, str] = {}
        self._unreadable = 0

    def news(self, tracker: GpuTracker, reading: GpuReading, node: str) -> Iterator[News]:
        """Every card that was lost or became suspect, and the driver that answers for none of them.

        Not those that are suspect because they were drained for it: that is told when it is recorded.
        """
        error = tracker.unreadable(reading)
        if error is not None:
            self._unreadable += 1
            if self._unreadable == _UNREADABLE_AFTER:
                yield News("gpu_lost", f"no GPU of {node} can be read: {error}", node)
            return
        self._unreadable = 0
        listed = {gpu.uuid for gpu in reading.gpus}
        missing = [gpu for gpu, _ in tracker.lost() if gpu.uuid not in listed]
        for gpu in (*reading.gpus, *missing):
            if gpu.uuid not in self._bad and tracker.is_sound(gpu.uuid):
                # Nearly always, and much cheaper to find out than what else to say of it.
                continue
            status = tracker.status(gpu.uuid)
            event = _EVENTS.get(status.state)
            if gpu.mig_parent is not None and tracker.status(gpu.mig_parent).state in _EVENTS:
                # What its card has, all instances have: that is told of the card.
                continue
            if event is None:
                # One that cannot be judged now is not well yet.
                if status.state != GpuState.UNKNOWN:
                    self._bad.pop(gpu.uuid, None)
            elif self._bad.get(gpu.uuid) != event:
                self._bad[gpu.uuid] = event
                if event == "gpu_suspect" and tracker.is_drained(gpu.uuid):
                    continue
                what = "was lost" if event == "gpu_lost" else "is suspect"
                why = (status.why or "see ginfo").removeprefix("lost: ").removeprefix(SUSPECT)
                text = f"GPU {gpu_label(gpu.index)} ({gpu.name}, {gpu.uuid}) {what}: {why}"
                yield News(event, text, node, gpu.uuid)
