"""Which GPUs have become worth a word to the administrator since the last look."""

from __future__ import annotations

from collections.abc import Iterator

from gpusched.gpu.tracker import GpuTracker
from gpusched.model.cluster import GpuReading, GpuState

_EVENTS = {GpuState.LOST: "gpu_lost", GpuState.SUSPECT: "gpu_suspect"}


class GpuWatch:
    """Compares the state of each card with the one before. What is wrong at the first look is told then."""

    def __init__(self) -> None:
        self._bad: dict[str, str] = {}

    def news(self, tracker: GpuTracker, reading: GpuReading) -> Iterator[tuple[str, str, str]]:
        """Event, UUID and sentence of every card that was lost or became suspect."""
        if reading.error is not None:
            # Nothing is known of any card now.
            return
        for gpu in reading.gpus:
            status = tracker.status(gpu.uuid)
            event = _EVENTS.get(status.state)
            if event is None:
                # One that cannot be judged now is not well yet.
                if status.state != GpuState.UNKNOWN:
                    self._bad.pop(gpu.uuid, None)
            elif self._bad.get(gpu.uuid) != event:
                self._bad[gpu.uuid] = event
                what = "was lost" if event == "gpu_lost" else "is suspect"
                yield event, gpu.uuid, f"GPU {gpu.index} ({gpu.name}, {gpu.uuid}) {what}: {status.why or 'see ginfo'}"
