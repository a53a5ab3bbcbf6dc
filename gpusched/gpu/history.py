"""One GPU over time: for how many readings in a row it was healthy, free, in foreign use. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from math import inf

from gpusched.gpu.release import GpuRelease, is_same, named_openers, remains
from gpusched.gpu.usage import Bookings, GpuUsage, attribute, foreign_mib, share_uses
from gpusched.model.cluster import Clearance, GpuProcess, GpuSample, ShareUse
from gpusched.model.job import split_run_id
from gpusched.model.mentions import mention_jobs
from gpusched.model.settings import GpuSettings
from gpusched.model.units import card_index, format_duration, format_size_mib, gpu_label


class Heat:
    """Whether a GPU has been too hot for long; it recovers after being cool for as long."""

    def __init__(self) -> None:
        self.is_hot = False
        self._other_since: float | None = None
        """Since when the opposite of `is_hot` was measured."""

    def fold(self, at: float, sample: GpuSample, settings: GpuSettings) -> None:
        """Fold in a sample. One without a temperature changes nothing."""
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
    """Reasons to suspect the card, each as a sentence with a remedy."""
    found = []
    errors = new_errors(sample, clearance)
    if settings.ecc_errors and errors >= settings.ecc_errors:
        told = f"{errors} uncorrectable memory error{'' if errors == 1 else 's'}"
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
            f"it was too hot{limit} for {format_duration(settings.hot_s)} and throttles; check its fans and airflow"
        )
    return tuple(found)


def new_errors(sample: GpuSample, clearance: Clearance | None) -> int:
    """Memory errors not yet accepted; 0 when the driver reports none."""
    errors = sample.ecc_errors or 0
    accepted = clearance.ecc_errors or 0 if clearance is not None else 0
    # A reset starts the count again.
    return errors - accepted if errors >= accepted else errors


def remark(sample: GpuSample) -> str | None:
    """A note for people that excludes no job."""
    if sample.remap_pending:
        return _waits_for_reset(sample)
    if sample.mps is False and not sample.mig_enabled:
        return "[gpu] mps_dir is set, but no MPS control daemon runs for it"
    return None


def _waits_for_reset(sample: GpuSample) -> str:
    return f"a broken memory row waits for a reset: nvidia-smi -r -i {card_index(sample.index)}"


_PROHIBITED, _EXCLUSIVE = 2, 3
_IDLE_UTILISATION = 0.02
_NOBODY: frozenset[int] = frozenset()
_NAMED = 3
"""Number of foreign processes named."""


class GpuHistory:
    """Folds samples of one device. All results describe the last good sample, or say why there is none."""

    def __init__(self, sample: GpuSample, settings: GpuSettings) -> None:
        self.sample = sample
        self.usage: GpuUsage | None = None
        """Of the last good sample."""
        self.shares: tuple[ShareUse, ...] | None = None
        """Of the last reading; None when that said nothing."""
        self._over: dict[str, tuple[float, int]] = {}
        """By run, when it was seen to hold most beyond its booking of late, and how much (MiB)."""
        self.total_mib: int | None = None
        """Bookable memory when it was last known."""
        self.good_at: float | None = None
        self.trouble: str | None = None
        """Why the last reading says nothing about this card."""
        self.missed_polls = 0
        """Readings in a row in which the driver answered and did not list it."""
        self.is_missing = False
        self.lost_at: float | None = None
        """When it was first seen to be lost; None while it is there, or may be."""
        self.booked: Bookings = ()
        self.releases: dict[str, GpuRelease] = {}
        self.before_mib = 0
        """Unexplained memory when no run was booked last."""
        self.left_mib = 0
        """Memory that ended runs have not given back in time: no job has it, and none can get it."""
        self.clearance: Clearance | None = None
        self.idle_since: float | None = None
        """Since when it has been idle; None while it works or reports nothing."""
        self._heat = Heat()
        self._settings = settings
        self._good_polls = 0
        self._free_polls = 0
        self._busy_polls = 0
        """Readings in a row in which it worked for foreign processes only."""
        self._peaks: deque[tuple[float, int, frozenset[int]]] = deque()
        """(instant, foreign MiB, foreign pids), falling: the first is the peak of the window."""
        self._unbooked: dict[str, tuple[float, int]] = {}
        """By run that did not book the card, when it was seen to hold most of it of late, and how much (MiB)."""
        self._departed_mib = 0
        """Memory that ended runs which had not booked the card are still to give back: it goes late, or stays."""
        self._jobs: Mapping[str, str] = {}
        """By run that has not ended, the name of its job."""
        self._owned: dict[str, dict[int, float | None]] = {}

    def adopt(self, settings: GpuSettings) -> None:
        self._settings = settings

    # --- folding --------------------------------------------------------------------------------

    def fold(
        self, at: float, sample: GpuSample, owners: Mapping[int, str], booked: Bookings, jobs: Mapping[str, str]
    ) -> None:
        """Fold in a sample from a reading in which the driver answered.

        Args: owners, booked: see `attribute`; jobs: run handle -> name of its job, of all runs that have not ended.
        """
        self._jobs = jobs
        if sample.mig_enabled is not self.sample.mig_enabled:
            # In effect another GPU than before: it must prove healthy again.
            self._good_polls = self._free_polls = 0
        self.sample = sample
        self.is_missing = False
        self.missed_polls = 0
        self.booked = booked
        if sample.vram_total_mib is not None:
            self.total_mib = sample.vram_total_mib - sample.vram_reserved_mib
        self.trouble = _trouble(sample)
        self.shares = None
        if not sample.is_lost:
            self.lost_at = None
        elif self.lost_at is None:
            self.lost_at = at
        if self.trouble is not None:
            self._good_polls = self._free_polls = self._busy_polls = 0
            if self.is_lost:
                self._give_up_releases()
            return
        self.usage = usage = attribute(sample, owners, booked)
        self.good_at = at
        self.shares = share_uses(sample, usage, booked, self.total_mib)
        self._fold_over(at, self.shares)
        self._heat.fold(at, sample, self._settings)
        if sample.utilisation is None or sample.utilisation > _IDLE_UTILISATION:
            self.idle_since = None
        elif self.idle_since is None or at < self.idle_since:
            self.idle_since = at
        self._good_polls += 1
        self._remember_pids(usage, booked)
        self._fold_releases(at, sample, usage, booked)
        # Until then either there is nothing, or the booking of the ended run still covers it.
        self.left_mib = usage.rest_mib if self.is_dirty else 0
        if not booked and not self.releases:
            self.before_mib = usage.rest_mib
        intruding_mib = self._fold_foreign(at, usage)
        works_for_foreign = bool(usage.intruders) and not booked and not self.releases and self._is_at_work(sample)
        self._busy_polls = self._busy_polls + 1 if works_for_foreign else 0
        is_free = intruding_mib <= self.foreign_limit_mib and not self.is_foreign_busy
        self._free_polls = self._free_polls + 1 if is_free else 0

    def _is_at_work(self, sample: GpuSample) -> bool:
        return sample.utilisation is not None and sample.utilisation > self._settings.foreign_utilisation

    def miss(self, at: float, why: str, booked: Bookings, *, is_missing: bool = False) -> None:
        """Handle a reading without this card's data. Args: is_missing: the driver answers, but does not list it."""
        self.trouble = why
        self.shares = None
        self.booked = booked
        self.is_missing = is_missing
        self._good_polls = self._free_polls = self._busy_polls = 0
        self.missed_polls = self.missed_polls + 1 if is_missing else 0
        if self.missed_polls > 1 and self.lost_at is None:
            # Once may be a driver that is still coming up.
            self.lost_at = at
        if is_missing and self.is_instance:
            # Its memory went with it.
            self.releases.clear()
        elif is_missing:
            self._give_up_releases()

    def _fold_over(self, at: float, shares: tuple[ShareUse, ...]) -> None:
        """Track the peak of memory that runs hold beyond their bookings: a run that frees some may take it again."""
        before, self._over = self._over, {}
        for use in shares:
            peak_at, peak_mib = before.get(use.run, (at, 0))
            is_old = not 0 <= at - peak_at <= self._settings.foreign_peak_s
            if use.used_mib is not None and (is_old or use.over_mib >= peak_mib):
                peak_at, peak_mib = at, use.over_mib
            if peak_mib:
                self._over[use.run] = peak_at, peak_mib

    def _remember_pids(self, usage: GpuUsage, booked: Bookings) -> None:
        for run, processes in usage.pids.items():
            owned = self._owned.setdefault(run, {})
            owned.update((process.pid, process.started_at) for process in processes)
        live = {run for run, _ in booked} | usage.pids.keys()
        for run in [run for run in self._owned if run not in live]:
            del self._owned[run]

    def _fold_releases(self, at: float, sample: GpuSample, usage: GpuUsage, booked: Bookings) -> None:
        others = [(run, share) for run, share in booked if run not in self.releases]
        for run, release in list(self.releases.items()):
            if at <= release.began_at:
                continue  # begun before the run's end
            release.former.update(self._owned.get(run, {}))
            why = remains(release, sample, usage, others, self.before_mib, self._settings.baseline_mib)
            if why is None:
                del self.releases[run]
            else:
                release.why = why

    def _give_up_releases(self) -> None:
        # Nothing will be measured on a card that is gone; its runs must not wait for it.
        for release in self.releases.values():
            release.is_dirty = True

    def _fold_foreign(self, at: float, usage: GpuUsage) -> int:
        """Track foreign and unbooked use; returns how much of the card is neither free nor our runs' (MiB)."""
        if self._has_only_ours(usage):
            self._peaks = deque(((at, 0, _NOBODY),))
            return 0
        foreign = [process for process in usage.intruders if process.run is None]
        former = {process.pid for process in foreign if self._was_owned(process)}
        ours = former.union(process.pid for processes in usage.pids.values() for process in processes)
        ours.update(process.pid for process in usage.intruders if process.run is not None)
        # A process that was foreign may turn out to be ours, as when runs are adopted after a restart.
        kept = [entry for entry in self._peaks if not entry[2] & ours]
        unbooked_mib = sum(usage.unbooked.values())
        # Memory that an ended run has not released is not foreign, nor is its process that lives a little longer.
        is_releasing = bool(self.releases)
        mib = usage.visible_mib - unbooked_mib if is_releasing else foreign_mib(usage, self._settings.baseline_mib)
        mib -= sum(process.vram_mib or 0 for process in foreign if process.pid in former)
        departed = sum(mib for run, (_, mib) in self._unbooked.items() if run not in self._jobs)
        is_left = not is_releasing and usage.rest_mib > self._settings.baseline_mib
        self._departed_mib = min(mib, usage.rest_mib, self._departed_mib + departed) if is_left else 0
        # No run can take it again, so it counts only while it is there.
        mib -= self._departed_mib
        while kept and (kept[-1][1] <= mib or kept[-1][0] > at):
            kept.pop()
        kept.append((at, mib, frozenset(process.pid for process in foreign) - former))
        self._peaks = deque(kept)
        self._fold_unbooked(at, usage)
        return mib + unbooked_mib + self._departed_mib

    def _has_only_ours(self, usage: GpuUsage) -> bool:
        """Whether nothing but our runs is on the card, nor was of late."""
        is_explained = usage.rest_mib <= self._settings.baseline_mib and not usage.has_blind_spot
        was_free = not (self._unbooked or self._departed_mib or (self._peaks and self._peaks[0][1] > 0))
        return is_explained and was_free and not usage.intruders

    def _was_owned(self, process: GpuProcess) -> bool:
        """Whether it was seen as a process of a run still booked here; another process may have reused its pid."""
        return any(is_same(process, pids) for pids in self._owned.values())

    def _fold_unbooked(self, at: float, usage: GpuUsage) -> None:
        """Track the peak of unbooked use, like that of foreign use: a program may be between two of its processes.

        An ended run cannot take the memory again, so its peak is dropped.
        """
        before, self._unbooked = self._unbooked, {}
        for run in before.keys() | usage.unbooked.keys():
            peak_at, peak_mib = before.get(run, (at, 0))
            held_mib = usage.unbooked.get(run)
            if held_mib is None and run not in self._jobs:
                continue
            is_old = not 0 <= at - peak_at <= self._settings.foreign_peak_s
            if is_old or (held_mib or 0) >= peak_mib:
                peak_at, peak_mib = at, held_mib or 0
            if held_mib is not None or peak_mib:
                self._unbooked[run] = peak_at, peak_mib

    # --- what it says ---------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        return self.sample.is_lost or self.is_missing

    @property
    def is_instance(self) -> bool:
        return self.sample.mig_parent is not None

    @property
    def is_dirty(self) -> bool:
        """Whether an ended run has not released the card."""
        return any(release.is_dirty for release in self.releases.values())

    @property
    def can_share(self) -> bool:
        """Whether processes of several jobs can use the GPU."""
        return self.sample.compute_mode == 0 and not self.sample.mig_enabled and not self.is_instance

    @property
    def intruders(self) -> tuple[GpuProcess, ...]:
        """Foreign processes, and those of runs that did not book the card, in the last good sample."""
        return self.usage.intruders if self.usage else ()

    @property
    def foreign_limit_mib(self) -> int:
        """Memory of intruders above which whole-card jobs avoid the card."""
        settings = self._settings
        limit_mib = settings.foreign_mib
        if self.total_mib is not None:
            limit_mib = min(limit_mib, int(settings.foreign_fraction * self.total_mib))
        return limit_mib + (settings.display_mib if self.sample.display_active else 0)

    @property
    def is_foreign_busy(self) -> bool:
        """Whether only intruders keep the card busy; a single reading may still reflect an ended job."""
        return self._busy_polls >= self._settings.free_polls

    def intruding_mib(self, now: float) -> int:
        """Peak over the window of memory that no booking explains; current memory always counts."""
        return self._foreign_peak_mib(now) + sum(mib for _, mib in self._unbooked.values())

    def _foreign_peak_mib(self, now: float) -> int:
        peaks = self._peaks
        while len(peaks) > 1 and peaks[0][0] < now - self._settings.foreign_peak_s:
            peaks.popleft()
        return self._departed_mib + (peaks[0][1] if peaks else 0)

    @property
    def over_mib(self) -> int:
        """Memory that runs hold beyond their bookings, each at its recent peak."""
        return sum(mib for _, mib in self._over.values())

    @property
    def loss(self) -> str | None:
        """What shows that it is lost, as far as known."""
        return self.trouble if self.is_missing else self.sample.error

    def fault(self, now: float, stale_after_s: float) -> str | None:
        """Why its state is unknown."""
        if self.is_lost:
            return f"lost: {self.loss}" if self.loss else "lost"
        if self.trouble is not None:
            return self.trouble
        if self.good_at is None:
            return "not read yet"
        if now - self.good_at > stale_after_s:
            return f"no reading for {now - self.good_at:.0f} s"
        return None

    def same_until(self, now: float, stale_after_s: float) -> float:
        """Until when `fault`, `intrusion` and `intruding_mib` say the same without another reading, from `now` on."""
        until = inf if len(self._peaks) < 2 else self._peaks[0][0] + self._settings.foreign_peak_s
        if self.good_at is None or self.is_lost or self.trouble is not None:
            return until
        stale_at = self.good_at + stale_after_s
        # The text of a stale one counts the seconds.
        return min(until, stale_at) if now <= stale_at else -inf

    def obstacle(self) -> str | None:
        """Why its mode allows no job here."""
        if self.sample.mig_enabled:
            count = self.sample.mig_instances
            if count:
                return f"MIG is on: {count} instance{'s are' if count > 1 else ' is'} in its place"
            make = f"gctl mig set {self.sample.index} LAYOUT"
            return f"MIG is on without instances; create some with: {make}, or switch MIG off"
        if self.sample.mig_pending:
            return f"MIG is switched on after a reset: nvidia-smi -r -i {self.sample.index}"
        if self.sample.compute_mode == _PROHIBITED:
            return "its compute mode is prohibited; allow jobs with: nvidia-smi -c 0"
        if self.sample.compute_mode == _EXCLUSIVE and self.intruders:
            return f"its compute mode allows one process, taken by {self._names(self.intruders[:1])}"
        return None

    def suspicion(self) -> str | None:
        """Why the card is suspect: leftovers of an ended run, or its own measurements."""
        for _, release in sorted(self.releases.items()) if self.releases else ():
            if release.is_dirty:
                return release.why
        found = ailments(self.sample, self._heat.is_hot, self._settings, self.clearance)
        return "; ".join(found) or None

    def remark(self) -> str | None:
        return remark(self.sample)

    def probation(self) -> str | None:
        """Why a healthy GPU is not used yet."""
        wanted = self._settings.free_polls
        if self._good_polls < wanted:
            return f"healthy in {self._good_polls} of {wanted} readings in a row, needed before its first use"
        return None

    def intrusion(self, now: float) -> str | None:
        """Why a whole-GPU job should avoid it."""
        foreign_mib, intruding_mib = self._foreign_peak_mib(now), self.intruding_mib(now)
        if intruding_mib > self.foreign_limit_mib:
            unbooked_mib = intruding_mib - foreign_mib
            parts = [self._unbooked_use(unbooked_mib)] if self._unbooked else []
            if foreign_mib > self.foreign_limit_mib or unbooked_mib <= self.foreign_limit_mib:
                parts.append(self._foreign_use(foreign_mib))
            return "; ".join(parts)
        if self.is_foreign_busy and self.intruders:
            what = "unbooked" if all(process.run is not None for process in self.intruders) else "foreign"
            busy = f"{100 * (self.sample.utilisation or 0.0):.0f} % busy with"
            return f"{what} use: {busy} {self._names(self.intruders)}"
        if self._free_polls < self._settings.free_polls:
            return f"free in {self._free_polls} of {self._settings.free_polls} readings in a row needed"
        return None

    def _foreign_use(self, mib: int) -> str:
        """The part of an intrusion that belongs to no job."""
        foreign = [process for process in self.intruders if process.run is None]
        if foreign:
            return f"foreign use of {format_size_mib(mib)}: {self._names(foreign)}"
        if self.usage is not None and foreign_mib(self.usage, self._settings.baseline_mib) >= mib:
            openers = named_openers(self.sample)
            found = f", but open: {openers}" if openers else ""
            return f"foreign use of {format_size_mib(mib)} by no visible process{found}"
        window = format_duration(self._settings.foreign_peak_s)
        return f"foreign use of {format_size_mib(mib)} within the last {window}"

    def _unbooked_use(self, mib: int) -> str:
        """The part of an intrusion that belongs to jobs."""
        is_gone = not any(process.run is not None for process in self.intruders)
        window = f" within the last {format_duration(self._settings.foreign_peak_s)}" if is_gone else ""
        return f"unbooked use of {format_size_mib(mib)}{window}: {self._jobs_of(self._unbooked)}"

    def _names(self, intruders: Sequence[GpuProcess]) -> str:
        """Name jobs, and the three foreign processes that hold most, with the number of others."""
        runs = {process.run: None for process in intruders if process.run is not None}
        foreign = sorted(
            (process for process in intruders if process.run is None), key=lambda process: -(process.vram_mib or 0)
        )
        more = f" and {len(foreign) - _NAMED} more" if len(foreign) > _NAMED else ""
        names = [self._jobs_of(runs)] if runs else []
        return ", ".join((*names, *map(_name, foreign[:_NAMED]))) + more

    def _jobs_of(self, runs: Iterable[str]) -> str:
        """Format `job 2, which did not book it`."""
        names = [self._jobs.get(run, str(split_run_id(run)[0])) for run in sorted(runs, key=split_run_id)]
        return f"{mention_jobs(names, named=len(names))}, which did not book it"


def _trouble(sample: GpuSample) -> str | None:
    if sample.is_lost:
        return sample.error or "lost"
    if sample.error is not None:
        return sample.error
    if sample.vram_total_mib is None or (sample.vram_used_mib is None and not sample.is_declared):
        return "its memory cannot be read"
    return None


def _name(process: GpuProcess) -> str:
    held = "" if process.vram_mib is None else f", {format_size_mib(process.vram_mib)}"
    return f"pid {process.pid} ({process.user or 'unknown user'}{held})"
