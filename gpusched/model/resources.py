"""Resource amounts for shares, quotas and usage."""

from __future__ import annotations

from gpusched.model.value import Value


class Resources(Value):
    """GPUs (a slice counts its fraction of the card), VRAM and memory in MiB, cores. Also amounts times seconds."""

    gpus: float = 0.0
    vram_mib: float = 0.0
    cpus: float = 0.0
    mem_mib: float = 0.0

    def __add__(self, other: Resources) -> Resources:
        return Resources(
            self.gpus + other.gpus,
            self.vram_mib + other.vram_mib,
            self.cpus + other.cpus,
            self.mem_mib + other.mem_mib,
        )

    def __sub__(self, other: Resources) -> Resources:
        return Resources(
            self.gpus - other.gpus,
            self.vram_mib - other.vram_mib,
            self.cpus - other.cpus,
            self.mem_mib - other.mem_mib,
        )

    def times(self, factor: float) -> Resources:
        return Resources(self.gpus * factor, self.vram_mib * factor, self.cpus * factor, self.mem_mib * factor)

    def dominant_share(self, capacity: Resources) -> float:
        """Largest share of any resource in the capacity; 0 for an empty capacity.

        Source: Ghodsi et al., Dominant Resource Fairness (NSDI 2011).
        """
        share = 0.0
        if capacity.gpus > 0:
            share = self.gpus / capacity.gpus
        if capacity.vram_mib > 0:
            share = max(share, self.vram_mib / capacity.vram_mib)
        if capacity.cpus > 0:
            share = max(share, self.cpus / capacity.cpus)
        if capacity.mem_mib > 0:
            share = max(share, self.mem_mib / capacity.mem_mib)
        return share


NOTHING = Resources()
