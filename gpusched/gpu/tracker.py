"""Folds readings of the GPUs into the policy's input. Pure: time comes with the reading and as `now`.

Our bookings decide what may start; measurements can only veto. Unknown is never free: a card is
placeable only while good readings of it keep coming.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpusched.gpu.device import is_nameless
from gpusched.gpu.history import GpuHistory
from gpusched.gpu.release import CLEAN, DIRTY, WAITING, GpuRelease
from gpusched.gpu.usage import Bookings, GpuUsage
from gpusched.model.cluster import (
    SUSPECT,
    Clearance,
    GpuProcess,
    GpuReading,
    GpuSample,
    GpuState,
    GpuStatus,
    GpuView,
    ShareUse,
)
from gpusched.model.job import GpuShare, Run
from gpusched.model.settings import GpuSettings
from gpusched.model.value import replace


@dataclass(frozen=True, slots=True)
class RunMeter:
    """Measured use of one run over all its cards; None means unknown."""

    peak_vram_mib: int | None
    """Largest sum over its cards at one instant."""
    mean_utilisation: float | None
    """Mean over its cards, 0 to 1; on a shared card that of the whole card."""
    energy_j: float | None


@dataclass(frozen=True, slots=True)
class RunGpuUse:
    run: str
    share: GpuShare
    sample: GpuSample
    usage: GpuUsage
    before_mib: int
    """Unexplained memory before the run."""

    def vram_mib(self) -> int | None:
        seen = self.usage.ours.get(self.run, 0)
        if self.run in self.usage.ours and seen is not None:
            return seen
        if not self.share.is_whole:
            return None if seen is None or self.sample.processes is None else seen
        if self.sample.vram_used_mib is None or self.sample.unified_memory:
            return None
        return max(0, self.sample.vram_used_mib - self.usage.visible_mib - self.before_mib)


class UsageMeter:
    __slots__ = ("_at", "_busy_s", "_energy_j", "_last_known", "_peak_mib", "_power_w", "_seen_s", "_utilisation")

    def __init__(self) -> None:
        self._at: float | None = None
        self._peak_mib: int | None = None
        self._utilisation: float | None = None
        self._last_known: float | None = None
        self._busy_s = 0.0
        self._seen_s = 0.0
        self._power_w: float | None = None
        self._energy_j: float | None = None

    def add(self, at: float, uses: Sequence[RunGpuUse]) -> None:
        amounts = [amount for use in uses if (amount := use.vram_mib()) is not None]
        if amounts:
            self._peak_mib = max(self._peak_mib or 0, sum(amounts))
        loads = [use.sample.utilisation for use in uses if use.sample.utilisation is not None]
        utilisation = sum(loads) / len(loads) if loads else None
        powers = [use.sample.power_w for use in uses if use.share.is_whole]
        known = [power for power in powers if power is not None]
        power_w = sum(known) if known and len(known) == len(uses) else None
        elapsed_s = 0.0 if self._at is None else max(0.0, at - self._at)
        if utilisation is not None and self._utilisation is not None:
            self._busy_s += (utilisation + self._utilisation) / 2 * elapsed_s
            self._seen_s += elapsed_s
        if power_w is not None and self._power_w is not None:
            self._energy_j = (self._energy_j or 0.0) + (power_w + self._power_w) / 2 * elapsed_s
        self._utilisation = utilisation
        if utilisation is not None:
            self._last_known = utilisation
        self._power_w = power_w
        self._at = at

    def result(self) -> RunMeter:
        mean = self._busy_s / self._seen_s if self._seen_s > 0 else self._last_known
        return RunMeter(self._peak_mib, mean, self._energy_j)


__all__ = ["CLEAN", "DIRTY", "WAITING", "GpuStatus", "GpuTracker", "RunMeter"]

_NO_JOBS: Mapping[str, str] = {}


class GpuTracker:
    """All GPUs of one node. `poll_s` is the longest regular time between two readings."""

    def __init__(self, settings: GpuSettings, poll_s: float = 5.0) -> None:
        self._cards: dict[str, GpuHistory] = {}
        self.adopt(settings, poll_s)
        self._early: dict[str, dict[str, GpuRelease]] = {}
        """Releases on cards that have not been read yet."""
        self._ended: set[str] = set()
        """Runs whose releases have begun."""
        self._drains: Mapping[str, str] = {}
        self._clearances: Mapping[str, Clearance] = {}
        self._meters: dict[str, UsageMeter] = {}
        self._now = 0.0

    def adopt(self, settings: GpuSettings, poll_s: float) -> None:
        self._settings = settings
        self._stale_after_s = max(3 * poll_s, 2 * settings.deadline_s)
        for card in self._cards.values():
            card.adopt(settings)

    # --- what comes in --------------------------------------------------------------------------

    def observe(
        self,
        reading: GpuReading,
        owners: Mapping[int, str],
        booked: Mapping[str, Bookings],
        jobs: Mapping[str, str] = _NO_JOBS,
    ) -> None:
        """Fold one reading.

        Args: owners: pid -> run handle, for processes of the reading that belong to a run;
        booked: GPU UUID -> (run handle, share) of all open runs, including those being released;
        jobs: run handle -> name of its job, of all runs that have not ended, including those without a GPU.
        """
        self._now = reading.at
        error = self.unreadable(reading)
        if error is not None:
            for uuid, card in self._cards.items():
                card.miss(reading.at, error, booked.get(uuid, ()))
            return
        seen = set()
        for sample in reading.gpus:
            seen.add(sample.uuid)
            if sample.uuid not in self._cards:
                self._cards[sample.uuid] = GpuHistory(sample, self._settings)
                self._cards[sample.uuid].clearance = self._clearances.get(sample.uuid)
                self._cards[sample.uuid].releases.update(self._early.pop(sample.uuid, {}))
            self._cards[sample.uuid].fold(reading.at, sample, owners, booked.get(sample.uuid, ()), jobs)
        for uuid, card in list(self._cards.items()):
            if uuid in seen:
                continue
            if (card.is_instance or is_nameless(uuid)) and not booked.get(uuid):
                # A recreated one has a new UUID, and a card that answers has its own: the old one never comes
                # back.
                del self._cards[uuid]
                continue
            what = "the MIG instance is gone" if card.is_instance else "the driver no longer lists it"
            card.miss(reading.at, f"lost: {what}", booked.get(uuid, ()), is_missing=True)
        self._measure(reading.at, booked)

    def unreadable(self, reading: GpuReading) -> str | None:
        """Why a reading has no data on any card: its error, or an empty list, as while the driver is reloaded."""
        if reading.error is None and not reading.gpus and self._cards:
            return "the driver no longer lists any GPU"
        return reading.error

    def identified(self, reading: GpuReading) -> GpuReading:
        """Add the UUIDs of lost cards that the driver no longer reports, as to a reader started since."""
        if not any(is_nameless(gpu.uuid) for gpu in reading.gpus):
            return reading
        listed = {gpu.uuid for gpu in reading.gpus}
        known = {card.sample.index: card.sample for uuid, card in self._cards.items() if uuid not in listed}
        gpus = []
        for gpu in reading.gpus:
            before = known.get(gpu.index) if is_nameless(gpu.uuid) else None
            if before is not None:
                gpu = replace(gpu, uuid=before.uuid, name=before.name, pci_bus_id=before.pci_bus_id, minor=before.minor)
            gpus.append(gpu)
        return replace(reading, gpus=tuple(gpus))

    def knows(self, uuid: str) -> bool:
        """Whether the card has been read, or an ended run on it is being watched."""
        return uuid in self._cards or uuid in self._early

    def lost(self) -> tuple[tuple[GpuSample, float], ...]:
        """Last sample of every lost card, and when its loss was first seen. Omits MIG instances, which come and go."""
        return tuple(
            (card.sample, card.lost_at)
            for uuid, card in self._cards.items()
            if card.lost_at is not None and not card.is_instance and not is_nameless(uuid)
        )

    def set_drains(self, drains: Mapping[str, str]) -> None:
        """Set the drained GPUs: UUID -> message; other keys are ignored."""
        self._drains = drains

    def set_clearances(self, clearances: Mapping[str, Clearance]) -> None:
        """Set what an administrator has accepted, by GPU UUID."""
        self._clearances = clearances
        for uuid, card in self._cards.items():
            card.clearance = clearances.get(uuid)

    def is_gone(self, uuid: str) -> bool:
        """Whether a MIG instance was missing in more than one reading."""
        card = self._cards.get(uuid)
        return card is not None and card.is_instance and card.missed_polls > 1

    def is_drained(self, uuid: str) -> bool:
        return uuid in self._drains

    def reconcile_releases(self, ended: Mapping[str, Run], now: float) -> None:
        """Watch the cards of exactly these ended runs until they are clean; idempotent.

        Args: ended: by run handle, all runs whose end is recorded and whose cards are not proven clean. now: for new
        runs, only later readings count. Other runs are dropped, unless dirty: these stay as measured.
        """
        if ended.keys() == self._ended:
            return
        for handle, run in ended.items():
            if handle not in self._ended:
                for share in run.gpus:
                    self.begin_release(share.uuid, handle, now)
                self._ended.add(handle)
        for handle in self._ended - ended.keys():
            for releases in (*self._early.values(), *(card.releases for card in self._cards.values())):
                if handle in releases and not releases[handle].is_dirty:
                    del releases[handle]
            self._ended.discard(handle)

    def begin_release(self, uuid: str, run: str, now: float) -> None:
        """Begin the release of an ended run: wait for a reading after `now` that shows the GPU clean of it."""
        card = self._cards.get(uuid)
        if card is not None and card.is_instance and card.is_missing:
            return  # its memory went with it
        releases = self._early.setdefault(uuid, {}) if card is None else card.releases
        releases.setdefault(run, GpuRelease(run, now))
        self._meters.pop(run, None)

    def is_released(self, run: str) -> bool:
        """Whether the GPUs of an ended run are being watched; for other runs nothing is proven."""
        return run in self._ended

    # --- what goes out --------------------------------------------------------------------------

    def is_sound(self, uuid: str) -> bool:
        """Whether nothing is known against the card in the last reading: neither lost, drained nor suspect."""
        card = self._cards.get(uuid)
        return (
            card is not None
            and self._drained(uuid, card) is None
            and card.fault(self._now, self._stale_after_s) is None
            and card.suspicion() is None
        )

    def is_measured(self, uuid: str, now: float) -> bool:
        """Whether the last good sample is recent enough to be valid now."""
        card = self._cards.get(uuid)
        return card is not None and card.fault(now, self._stale_after_s) is None

    def release_state(self, uuid: str, now: float, run: str | None = None) -> str:
        """`clean`, `waiting` or `dirty`, for one run or for the worst on this card.

        Dirty is final for the run; the card stays suspect until it is measured clean.
        """
        card = self._cards.get(uuid)
        releases = self._early.get(uuid, {}) if card is None else card.releases
        if card is not None and card.is_lost:
            for release in releases.values():
                release.is_dirty = True
        wait_s = self._settings.release_wait_s
        states = [release.state(now, wait_s) for handle, release in releases.items() if run is None or run == handle]
        for state in (DIRTY, WAITING):
            if state in states:
                return state
        return CLEAN

    def shares(self) -> dict[str, tuple[ShareUse, ...]]:
        """By GPU UUID, what the runs that share it use, for cards in the last reading."""
        return {uuid: card.shares for uuid, card in self._cards.items() if card.shares is not None}

    def intruders(self) -> dict[str, tuple[GpuProcess, ...]]:
        """By GPU UUID, processes that no booking explains, for cards in the last reading; see `GpuStatus`."""
        return {uuid: card.intruders for uuid, card in self._cards.items() if card.trouble is None and card.intruders}

    def meter(self, run: str) -> RunMeter | None:
        """Measured use of the run so far; None when no reading fell into it."""
        meter = self._meters.get(run)
        return None if meter is None else meter.result()

    def views(self, now: float) -> tuple[GpuView, ...]:
        """All GPUs ever read, by index, as the scheduler sees them at `now`."""
        views = [self._view(uuid, card, now) for uuid, card in self._cards.items()]
        views.sort(key=lambda view: (view.index, view.uuid))
        return tuple(views)

    def _view(self, uuid: str, card: GpuHistory, now: float) -> GpuView:
        drained = self._drained(uuid, card)
        why_not = (
            (drained if drained is None or drained.startswith(SUSPECT) else f"drained: {drained}")
            or card.fault(now, self._stale_after_s)
            or card.obstacle()
            or card.suspicion()
            or card.probation()
        )
        return GpuView(
            uuid=uuid,
            index=card.sample.index,
            name=card.sample.name,
            vram_total_mib=card.total_mib,
            foreign_mib=card.intruding_mib(now) + card.left_mib,
            over_mib=card.over_mib,
            why_not=why_not,
            why_not_whole=card.intrusion(now),
            foreign_limit_mib=card.foreign_limit_mib,
            is_foreign_busy=card.is_foreign_busy,
            has_host_memory=card.sample.unified_memory,
            can_share=card.can_share,
            utilisation=card.sample.utilisation,
            is_present=not card.is_lost and not card.sample.mig_enabled,
            link_group=card.sample.link_group,
            numa=card.sample.numa,
            ecc_errors=card.sample.ecc_errors,
            is_divided=card.sample.mig_enabled,
            mig_profile=card.sample.mig_profile,
            mig_parent=card.sample.mig_parent,
        )

    def _drained(self, uuid: str, card: GpuHistory) -> str | None:
        """Why the device, or the card it is part of, was drained."""
        return self._drains.get(uuid) or self._drains.get(card.sample.mig_parent or uuid)

    def status(self, uuid: str, shares: Sequence[GpuShare] | None = None, now: float | None = None) -> GpuStatus:
        """State of one GPU, for people.

        Args: shares: its current bookings (default: those of the last reading); now: default, the
        latest instant seen.
        """
        card = self._cards.get(uuid)
        if card is None:
            return GpuStatus(GpuState.UNKNOWN, "not read yet")
        if shares is None:
            shares = [share for _, share in card.booked]
        state, why = self._state(uuid, card, shares, self._now if now is None else now)
        return GpuStatus(state, why, card.intruders, card.sample, card.idle_since)

    def _state(self, uuid: str, card: GpuHistory, shares: Sequence[GpuShare], now: float) -> tuple[str, str | None]:
        fault = card.fault(now, self._stale_after_s)
        if card.is_lost:
            return GpuState.LOST, fault
        drained = self._drained(uuid, card)
        if drained is not None and drained.startswith(SUSPECT):
            return GpuState.SUSPECT, drained.removeprefix(SUSPECT)
        if drained is not None:
            return GpuState.DRAINING if shares else GpuState.DRAINED, drained
        if fault is not None:
            return GpuState.UNKNOWN, fault
        suspicion = card.suspicion()
        if suspicion is not None:
            return GpuState.SUSPECT, suspicion
        why = "; ".join(release.why for _, release in sorted(card.releases.items())) or card.intrusion(now)
        why = why or (card.obstacle() if shares else None)
        if any(share.is_whole for share in shares):
            return GpuState.ALLOCATED, why
        if shares:
            return GpuState.MIXED, why
        obstacle = card.obstacle()
        if obstacle is not None:
            # The mode was set on purpose: out of the pool, as if drained.
            return GpuState.DRAINED, obstacle
        probation = card.probation()
        if probation is not None:
            return GpuState.UNKNOWN, probation
        return (GpuState.IDLE, card.remark()) if why is None else (GpuState.MIXED, why)

    # --- meters ---------------------------------------------------------------------------------

    def _measure(self, at: float, booked: Mapping[str, Bookings]) -> None:
        uses: dict[str, list[RunGpuUse]] = {}
        booked_runs: set[str] = set()
        for uuid, shares in booked.items():
            booked_runs.update(run for run, _ in shares)
            card = self._cards.get(uuid)
            if card is None or card.trouble is not None or card.usage is None:
                continue
            for run, share in shares:
                if run not in card.releases:
                    use = RunGpuUse(run, share, card.sample, card.usage, card.before_mib)
                    uses.setdefault(run, []).append(use)
        for run in [run for run in self._meters if run not in booked_runs]:
            del self._meters[run]
        for run, cards in uses.items():
            self._meters.setdefault(run, UsageMeter()).add(at, cards)
