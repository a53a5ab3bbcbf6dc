"""Folds readings of the GPUs into the policy's input. Pure: time comes with the reading and as `now`.

Our bookings decide what may start; measurements can only veto. Unknown is never free: a card is
placeable only while good readings of it keep coming.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from operator import is_

from gpusched.gpu.device import is_nameless
from gpusched.gpu.energy import CardEnergy, CounterReading, EnergyCounters
from gpusched.gpu.history import GpuHistory
from gpusched.gpu.meter import MeterState, RunGpuUse, RunMeter, UsageMeter, run_energies
from gpusched.gpu.release import CLEAN, DIRTY, WAITING, GpuRelease
from gpusched.gpu.usage import Bookings
from gpusched.model.cluster import (
    Clearance,
    DrainCause,
    DrainEntry,
    GpuProcess,
    GpuReading,
    GpuSample,
    GpuState,
    GpuStatus,
    GpuView,
    ShareUse,
)
from gpusched.model.job import GpuShare, Run
from gpusched.model.mig import MigLayout
from gpusched.model.settings import GpuSettings
from gpusched.model.tariff import Tariff
from gpusched.model.value import replace

__all__ = ["CLEAN", "DIRTY", "WAITING", "GpuStatus", "GpuTracker", "RunMeter"]

_NO_JOBS: Mapping[str, str] = {}


class GpuTracker:
    """All GPUs of one node. `poll_s` is the longest regular time between two readings."""

    def __init__(self, settings: GpuSettings, poll_s: float = 5.0) -> None:
        self._cards: dict[str, GpuHistory] = {}
        self._views: tuple[GpuView, ...] = ()
        self._views_from, self._views_until = inf, -inf
        """The last views, and the instants between which they hold."""
        self._lost: tuple[tuple[GpuSample, float], ...] = ()
        self.has_losses = False
        """Whether a card or a MIG instance is missing."""
        self.adopt(settings, poll_s)
        self._early: dict[str, dict[str, GpuRelease]] = {}
        """Releases on cards that have not been read yet."""
        self._ended: set[str] = set()
        """Runs whose releases have begun."""
        self._expected: set[str] = set()
        """Runs that have ended, before their end is recorded: a reading may show by then that they left nothing."""
        self._drains: Mapping[str, DrainEntry] = {}
        self._layouts: Mapping[str, MigLayout] = {}
        self._clearances: Mapping[str, Clearance] = {}
        self._meters: dict[str, UsageMeter] = {}
        self._kept_meters: dict[str, MeterState] = {}
        """Of runs that an earlier daemon has measured, until a reading shows them."""
        self.counters = EnergyCounters()
        self.tariff: Tariff | None = None
        """What the energy of runs costs from now on."""
        self.card_energies: Mapping[str, CardEnergy] = {}
        """What the last reading adds to the energy of each card."""
        self.uses: Mapping[str, Sequence[RunGpuUse]] = {}
        """By run, what the last reading shows of it."""
        self._now = 0.0

    def adopt(self, settings: GpuSettings, poll_s: float) -> None:
        self._settings = settings
        self._stale_after_s = max(3 * poll_s, 2 * settings.deadline_s)
        for card in self._cards.values():
            card.adopt(settings)
        self._view_again()

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
        self._view_again()
        try:
            self._fold(reading, owners, booked, jobs)
        finally:
            self._note_losses()

    def _fold(
        self,
        reading: GpuReading,
        owners: Mapping[int, str],
        booked: Mapping[str, Bookings],
        jobs: Mapping[str, str],
    ) -> None:
        self._now = reading.at
        self.card_energies, self.uses = {}, {}
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
            card.miss(reading.at, what, booked.get(uuid, ()), is_missing=True)
        self._measure(reading, booked)

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
        return self._lost

    def _note_losses(self) -> None:
        missing = {uuid: card for uuid, card in self._cards.items() if card.lost_at is not None or card.is_missing}
        self.has_losses = bool(missing)
        self._lost = tuple(
            (card.sample, card.lost_at)
            for uuid, card in missing.items()
            if card.lost_at is not None and not card.is_instance and not is_nameless(uuid)
        )

    def set_drains(self, drains: Mapping[str, DrainEntry]) -> None:
        """Set the drained GPUs, by UUID; other keys are ignored."""
        self._drains = drains
        self._view_again()

    def set_layouts(self, wanted: Mapping[str, MigLayout]) -> None:
        """Set the MIG layouts that cards get as soon as they are idle, by GPU UUID: these take no jobs until then."""
        self._layouts = wanted
        self._view_again()

    def set_clearances(self, clearances: Mapping[str, Clearance]) -> None:
        """Set what an administrator has accepted, by GPU UUID."""
        self._clearances = clearances
        for uuid, card in self._cards.items():
            card.clearance = clearances.get(uuid)
        self._view_again()

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
                self._expected.discard(handle)
        for handle in self._ended - ended.keys():
            for releases in (*self._early.values(), *[card.releases for card in self._cards.values()]):
                if handle in releases and not releases[handle].is_dirty:
                    del releases[handle]
            self._ended.discard(handle)

    def expect_release(self, run: Run, now: float) -> None:
        """Watch the cards of a run that has ended, although its end is not recorded yet, for readings after `now`."""
        if run.id not in self._ended and run.id not in self._expected:
            for share in run.gpus:
                self._watch(share.uuid, run.id, now)
            self._expected.add(run.id)

    def is_proven(self, run: Run) -> bool:
        """Whether a reading since `expect_release` has shown all cards clean of a run whose end is not recorded yet."""
        return run.id in self._expected and all(
            (card := self._cards.get(share.uuid)) is not None and run.id not in card.releases for share in run.gpus
        )

    def begin_release(self, uuid: str, run: str, now: float) -> None:
        """Begin the release of an ended run: wait for a reading after `now` that shows the GPU clean of it."""
        self._watch(uuid, run, now)
        self._meters.pop(run, None)

    def _watch(self, uuid: str, run: str, now: float) -> None:
        card = self._cards.get(uuid)
        if card is not None and card.is_instance and card.is_missing:
            return  # its memory went with it
        releases = self._early.setdefault(uuid, {}) if card is None else card.releases
        releases.setdefault(run, GpuRelease(run, now))

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
        if any(release.is_dirty for release in releases.values()):
            # Given up on, perhaps just now: of releases, only that shows in the views.
            self._view_again()
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
        return None if meter is None else meter.result(self.tariff)

    def views(self, now: float) -> tuple[GpuView, ...]:
        """All GPUs ever read, by index, as the scheduler sees them at `now`: the same objects until one changes."""
        if self._views_from <= now < self._views_until:
            return self._views
        before = {view.uuid: view for view in self._views}
        views = []
        for uuid, card in self._cards.items():
            view, known = self._view(uuid, card, now), before.get(uuid)
            views.append(known if known is not None and known == view else view)
        views.sort(key=lambda view: (view.index, view.uuid))
        if len(views) != len(self._views) or not all(map(is_, views, self._views)):
            self._views = tuple(views)
        until = (card.same_until(now, self._stale_after_s) for card in self._cards.values())
        self._views_from, self._views_until = now, min(until, default=inf)
        return self._views

    def _view_again(self) -> None:
        """Forget how long the views hold: something of the cards has changed."""
        self._views_until = -inf

    def _view(self, uuid: str, card: GpuHistory, now: float) -> GpuView:
        drained = self._drained(uuid, card)
        if drained is not None:
            is_suspect = drained.cause.is_suspicion
            why_not: str | None = drained.text if is_suspect else f"drained: {drained.message}"
        else:
            why_not = card.fault(now, self._stale_after_s) or card.obstacle()
            suspicion = card.suspicion() if why_not is None else None
            is_suspect = suspicion is not None
            why_not = f"{GpuState.SUSPECT}: {suspicion}" if is_suspect else why_not or card.probation()
        return GpuView(
            uuid=uuid,
            index=card.sample.index,
            name=card.sample.name,
            vram_total_mib=card.total_mib,
            foreign_mib=card.intruding_mib(now) + card.left_mib,
            over_mib=card.over_mib,
            why_not=why_not,
            is_suspect=is_suspect,
            why_not_whole=card.intrusion(now),
            foreign_limit_mib=card.foreign_limit_mib,
            is_foreign_busy=card.is_foreign_busy,
            has_host_memory=card.sample.unified_memory,
            can_share=card.can_share,
            why_not_mps=card.sample.why_not_mps,
            utilisation=card.sample.utilisation,
            is_present=not card.is_lost and not card.sample.mig_enabled,
            link_group=card.sample.link_group,
            numa=card.sample.numa,
            ecc_errors=card.sample.ecc_errors,
            is_divided=card.sample.mig_enabled,
            mig_profile=card.sample.mig_profile,
            mig_parent=card.sample.mig_parent,
            mig_profiles=card.sample.mig.profiles if card.sample.mig is not None else (),
            mig_wanted=self._layouts.get(uuid),
        )

    def _drained(self, uuid: str, card: GpuHistory) -> DrainEntry | None:
        """The drain of the device, or of the card it is part of."""
        if not (self._drains or self._layouts):
            return None
        parent = card.sample.mig_parent or uuid
        drained = self._drains.get(uuid) or self._drains.get(parent)
        layout = self._layouts.get(parent)
        if drained is None and layout is not None:
            return DrainEntry(f"its MIG layout changes to {layout}", DrainCause.MIG_LAYOUT)
        return drained

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
        now = self._now if now is None else now
        drained = self._drained(uuid, card)
        detail: str | None = None
        if card.is_lost:
            state, why, detail = GpuState.LOST, card.fault(now, self._stale_after_s), card.loss
        elif drained is not None and drained.cause.is_suspicion:
            state, why, detail = GpuState.SUSPECT, drained.message, drained.message
        elif drained is not None:
            state, why = GpuState.DRAINING if shares else GpuState.DRAINED, drained.message
        elif (fault := card.fault(now, self._stale_after_s)) is not None:
            state, why = GpuState.UNKNOWN, fault
        elif (detail := card.suspicion()) is not None:
            state, why = GpuState.SUSPECT, f"{GpuState.SUSPECT}: {detail}"
        else:
            state, why = self._sound_state(card, shares, now)
        cause = None if drained is None else drained.cause
        return GpuStatus(state, why, card.intruders, card.sample, card.idle_since, detail, cause)

    @staticmethod
    def _sound_state(card: GpuHistory, shares: Sequence[GpuShare], now: float) -> tuple[str, str | None]:
        """State of a GPU that is neither lost, drained nor suspect."""
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

    def restore_meters(
        self, boot_id: str, counters: Sequence[CounterReading], meters: Mapping[str, MeterState]
    ) -> None:
        """Go on from what an earlier daemon has measured. Args: meters: by run handle."""
        self.counters.restore(counters, boot_id)
        self._kept_meters = {run: state for run, state in meters.items() if run not in self._meters}

    def meter_states(self) -> dict[str, MeterState]:
        """What the runs that hold cards have used so far."""
        return {**self._kept_meters, **{run: meter.state() for run, meter in self._meters.items()}}

    def _measure(self, reading: GpuReading, booked: Mapping[str, Bookings]) -> None:
        self.card_energies = self.counters.take(reading.at, reading.gpus)
        samples = {sample.uuid: sample for sample in reading.gpus}
        usages = {uuid: card.usage for uuid, card in self._cards.items()}
        energies = run_energies(self.card_energies, samples, usages, booked)
        uses: dict[str, list[RunGpuUse]] = {}
        booked_runs: set[str] = set()
        for uuid, shares in booked.items():
            booked_runs.update(run for run, _ in shares)
            card = self._cards.get(uuid)
            if card is None or card.trouble is not None or card.usage is None:
                continue
            for run, share in shares:
                if run not in card.releases and run not in self._expected:
                    energy = energies.get((run, uuid))
                    use = RunGpuUse(run, share, card.sample, card.usage, card.before_mib, energy)
                    uses.setdefault(run, []).append(use)
        for run in [run for run in self._meters if run not in booked_runs]:
            del self._meters[run]
        for run, cards in uses.items():
            meter = self._meters.get(run)
            if meter is None:
                meter = self._meters[run] = UsageMeter(self._kept_meters.pop(run, None))
            meter.add(reading.at, cards, self.tariff)
        self._kept_meters = {run: state for run, state in self._kept_meters.items() if run in booked_runs}
        self._expected &= booked_runs
        self.uses = uses
