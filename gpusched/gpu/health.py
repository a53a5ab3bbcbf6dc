"""What a card measures of itself that speaks against it: memory errors, repairs that failed, heat. Pure.

Such a card is suspect for as long as it says so; running jobs are left alone.
"""

from __future__ import annotations

from gpusched.model.cluster import Clearance, GpuSample
from gpusched.model.settings import GpuSettings
from gpusched.model.units import card_index, format_duration, gpu_label


class Heat:
    """Whether a card has been too hot for long; it is well again when it was cool for as long."""

    def __init__(self) -> None:
        self.is_hot = False
        self._other_since: float | None = None
        """Since when the opposite of `is_hot` was measured."""

    def fold(self, at: float, sample: GpuSample, settings: GpuSettings) -> None:
        """Take in a sample. One without a temperature says nothing."""
        if not settings.hot_s:
            self.is_hot, self._other_since = False, None
            return
        if sample.temperature_c is None or sample.slowdown_c is None:
            return
        if (sample.temperature_c >= sample.slowdown_c) is self.is_hot:
            self._other_since = None
            return
        if self._other_since is None or at < self._other_since:
            self._other_since = at
        if at - self._other_since >= settings.hot_s:
            self.is_hot, self._other_since = not self.is_hot, None


def ailments(sample: GpuSample, is_hot: bool, settings: GpuSettings, clearance: Clearance | None) -> tuple[str, ...]:
    """What makes the card suspect, each as a sentence with what to do."""
    found = []
    errors = new_errors(sample, clearance)
    if settings.ecc_errors and errors >= settings.ecc_errors:
        told = f"{errors} memory error{'' if errors == 1 else 's'} that could not be corrected"
        index = card_index(sample.index)
        found.append(
            f"{told}; reset it (nvidia-smi -r -i {index}), or accept that: gctl undrain {gpu_label(sample.index)}"
        )
    if settings.remap_failed and sample.remap_failed:
        found.append("a broken memory row could not be replaced; the card needs repair")
    if settings.remap_pending and sample.remap_pending:
        found.append(_waits_for_reset(sample))
    if is_hot and settings.hot_s:
        limit = "" if sample.slowdown_c is None else f" ({sample.slowdown_c:.0f} C)"
        found.append(
            f"it was too hot{limit} for {format_duration(settings.hot_s)} and slows down; look at its fans and its air"
        )
    return tuple(found)


def new_errors(sample: GpuSample, clearance: Clearance | None) -> int:
    """Memory errors that nobody has accepted yet; 0 when they are not told."""
    errors = sample.ecc_errors or 0
    accepted = clearance.ecc_errors or 0 if clearance is not None else 0
    # A reset starts the count again.
    return errors - accepted if errors >= accepted else errors


def remark(sample: GpuSample) -> str | None:
    """What is worth a word and keeps nobody out."""
    if sample.remap_pending:
        return _waits_for_reset(sample)
    if sample.mps is False and not sample.mig_enabled:
        return "[gpu] mps_dir is set, but no MPS control daemon runs for it"
    return None


def _waits_for_reset(sample: GpuSample) -> str:
    return f"a broken memory row waits for a reset: nvidia-smi -r -i {card_index(sample.index)}"
