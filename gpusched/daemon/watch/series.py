"""Records what cards, queues and runs did over time, and answers questions about it.

The last hour is in memory, a sample a second; each minute goes to `series.db` in one transaction. A restart loses at
most the current minute. Nothing here decides about a job: what fails is counted by `daemon.failures` and shown by
doctor.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from math import inf
from typing import TYPE_CHECKING

from gpusched.daemon.meters import MOST_QUEUES, OTHERS
from gpusched.daemon.nodes import ClusterNode
from gpusched.gpu.energy import CounterReading
from gpusched.gpu.meter import MeterState, RunGpuUse
from gpusched.model.cluster import GpuReading, GpuSample
from gpusched.model.samples import (
    CARD,
    QUEUE,
    Bucket,
    FoldingSeries,
    SampleKind,
    SeriesPiece,
    Values,
    card_values,
    fold_records,
)
from gpusched.model.states import JobState
from gpusched.model.value import decode, encode
from gpusched.store.series import KEPT_S, MINUTE_S, TEN_MINUTES_S, RunCurve, SeriesFile

if TYPE_CHECKING:
    from gpusched.daemon.core import Scheduler

RING_S = 3600
SHORTEST_RUN_S = 60.0
"""Shorter runs leave no curve."""
_SHORT_S = 600.0
"""A shorter time is shown by seconds even if the daemon has not run for all of it."""
_LEAST_GAP_S = 0.4
"""A reading that follows sooner is no sample: while runs end there are many a second. Its energy goes to the next one.
"""
CLUSTER = ""
"""Subject of the series of the whole cluster, beside those of queues."""


class SecondRing:
    """The last hour of one subject, a record a second."""

    def __init__(self, kind: SampleKind) -> None:
        self._kind = kind
        self.since: float | None = None
        """First sample; None before it."""
        self._stamps = array("I", [0]) * RING_S
        self._data = bytearray(kind.nothing * RING_S)
        self._newest: tuple[int, Values] | None = None
        """Second and values of the last sample, packed when another second begins: in one there may be many."""

    def put(self, at: int, values: Values) -> None:
        if self.since is None or at < self.since:
            self.since = float(at)
        if self._newest is not None and self._newest[0] != at:
            self._pack_newest()
        self._newest = at, values

    def _pack_newest(self) -> None:
        if self._newest is None:
            return
        (at, values), self._newest = self._newest, None
        place, size = at % RING_S, self._kind.record.size
        # Beyond 32 bits the clock is wrong, or it is the year 2106.
        self._stamps[place] = at & 0xFFFFFFFF
        self._data[place * size : (place + 1) * size] = self._kind.pack(values)

    def records(self, start_at: int, end_at: int) -> bytes:
        self._pack_newest()
        size, nothing = self._kind.record.size, self._kind.nothing
        found = []
        for at in range(start_at, end_at):
            place = at % RING_S
            is_known = self._stamps[place] == at & 0xFFFFFFFF
            found.append(bytes(self._data[place * size : (place + 1) * size]) if is_known else nothing)
        return b"".join(found)


class SeriesRecorder:
    """Time series of everything, and the energy counters and meters that outlive the daemon."""

    def __init__(self, scheduler: Scheduler, file: SeriesFile) -> None:
        self._scheduler = scheduler
        self._file = file
        self._rings: dict[tuple[str, str], SecondRing] = {}
        self._sampled_at: dict[str, float] = {}
        """Last reading of each node that was taken as a sample."""
        self._unsampled_j: dict[str, float] = {}
        """Energy that each card has used since then."""
        self._minute: dict[tuple[str, str], Bucket] = {}
        self._minute_at = int(scheduler.now()) // MINUTE_S * MINUTE_S
        self._curves: dict[tuple[str, str], FoldingSeries] = {}
        """By run and card, of open runs."""
        self._saved: dict[tuple[str, str], tuple[int, int]] = {}
        """Length and step of each curve as it is in the file."""
        self._counters = [decode(state, CounterReading) for state in file.counters()]
        self._meters = {key: decode(state, MeterState) for key, state in file.meters().items()}
        """Of runs on nodes that have not joined yet."""
        for curve in file.curves(scheduler.state.open_runs, CARD):
            self._curves[curve.run, curve.uuid] = curve.series
        scheduler.signals.gpus_read.connect(self.observed)
        scheduler.cluster.on_add = self._restore
        for node in scheduler.cluster:
            self._restore(node)

    def _restore(self, node: ClusterNode) -> None:
        """Go on with the counters and meters of a node that has joined."""
        mine = {run: state for (name, run), state in self._meters.items() if name == node.name}
        node.tracker.restore_meters(node.boot_id, self._counters, mine)
        self._meters = {key: state for key, state in self._meters.items() if key[0] != node.name}

    def close(self) -> None:
        """Write the current minute, as far as it has come."""
        self._write()
        self._file.close()

    # --- what comes in --------------------------------------------------------------------------

    def observed(self, node: ClusterNode, reading: GpuReading) -> None:
        """Take in a reading that the node's tracker has folded."""
        if reading.error is not None:
            return
        energies, unsampled = node.tracker.card_energies, self._unsampled_j
        for uuid, energy in energies.items():
            unsampled[uuid] = unsampled.get(uuid, 0.0) + energy.joules
        if not 0 <= reading.at - self._sampled_at.get(node.name, -inf) < _LEAST_GAP_S:
            self._sampled_at[node.name] = reading.at
            for sample in reading.gpus:
                if not sample.is_lost and sample.error is None:
                    self._add(CARD, sample.uuid, reading.at, _values(sample, unsampled.pop(sample.uuid, None)))
        for run, uses in node.tracker.uses.items():
            for use in uses:
                self._add_to_curve(run, use, reading.at)

    def _add(self, kind: SampleKind, subject: str, at: float, values: Values) -> None:
        key = kind.name, subject
        ring = self._rings.get(key)
        if ring is None:
            ring = self._rings[key] = SecondRing(kind)
        ring.put(int(at), values)
        bucket = self._minute.get(key)
        if bucket is None:
            bucket = self._minute[key] = Bucket(kind)
        bucket.add(values)

    def _add_to_curve(self, run: str, use: RunGpuUse, at: float) -> None:
        key = run, use.share.uuid
        curve = self._curves.get(key)
        if curve is None:
            curve = self._curves[key] = FoldingSeries(CARD, float(int(at)))
        sample, energy = use.sample, use.energy
        joules = None if energy is None else energy.joules
        # On a shared card, the run's part of the power.
        power_w = sample.power_w if use.share.is_whole and sample.mig_parent is None else None
        if power_w is None and energy is not None and energy.elapsed_s > 0:
            power_w = energy.joules / energy.elapsed_s
        curve.add(
            at,
            card_values(
                sample.utilisation, sample.memory_utilisation, sample.temperature_c, use.vram_mib(), power_w, joules
            ),
        )

    def poll(self) -> None:
        """Sample the queues, and once a minute write what has come in."""
        now = self._scheduler.now()
        minute_at = int(now) // MINUTE_S * MINUTE_S
        if minute_at != self._minute_at:
            self._write()
            self._minute_at = minute_at
        for subject, values in self._queues():
            self._add(QUEUE, subject, now, values)

    def _queues(self) -> Iterable[tuple[str, Values]]:
        scheduler = self._scheduler
        census, gpus = scheduler.state.census, scheduler.meters.gpus.by_queue
        pending: dict[str, int] = {}
        running: dict[str, int] = {}
        for (state, queue), jobs in census.by_queue.items():
            counts = pending if state is JobState.PENDING else running
            counts[queue] = counts.get(queue, 0) + jobs
        known = [*(scheduler.settings.queue or (scheduler.settings.default.queue,))]
        named = list(dict.fromkeys((*known, *sorted({*pending, *running}))))
        for queue in named[:MOST_QUEUES]:
            held = census.held_by_queue[queue]
            yield queue, (running.get(queue, 0), pending.get(queue, 0) - held, held, gpus.get(queue, 0.0), None)
        rest = named[MOST_QUEUES:]
        if rest:
            held = sum(census.held_by_queue[queue] for queue in rest)
            some = (sum(running.get(queue, 0) for queue in rest), sum(pending.get(queue, 0) for queue in rest) - held)
            yield OTHERS, (*some, held, sum(gpus.get(queue, 0.0) for queue in rest), None)
        held = census.held_by_queue.total()
        all_held = sum(gpus.values())
        idle = max(0.0, self._present_gpus() - all_held)
        yield CLUSTER, (sum(running.values()), sum(pending.values()) - held, held, all_held, idle)

    def _present_gpus(self) -> int:
        """Number of cards that answer; a divided one counts as one."""
        samples = self._scheduler.cluster.samples().values()
        return sum(1 for sample in samples if sample.mig_parent is None and not sample.is_lost and sample.error is None)

    # --- the minute -----------------------------------------------------------------------------

    def _write(self) -> None:
        scheduler = self._scheduler
        minute, self._minute = self._minute, {}
        rows = [(kind, subject, bucket.values()) for (kind, subject), bucket in minute.items() if not bucket.is_empty]
        open_runs = {*scheduler.state.open_runs, *scheduler.state.releasing}
        changed = []
        for key, curve in self._curves.items():
            is_new = (len(curve), curve.step_s) != self._saved.get(key)
            if curve.end_at - curve.start_at >= SHORTEST_RUN_S and (is_new or key[0] not in open_runs):
                changed.append(RunCurve(*key, curve))
                self._saved[key] = len(curve), curve.step_s
        counters = {
            reading.uuid: encode(reading).decode()
            for node in scheduler.cluster
            for reading in node.tracker.counters.readings()
        }
        meters = {
            (node.name, run): encode(state).decode()
            for node in scheduler.cluster
            for run, state in node.tracker.meter_states().items()
        }
        meters |= {key: encode(state).decode() for key, state in self._meters.items() if key[1] in open_runs}
        now = scheduler.now()
        self._file.write(now, self._minute_at, rows, curves=changed, counters=counters, meters=meters)
        for key in [key for key in self._curves if key[0] not in open_runs]:
            del self._curves[key]
            self._saved.pop(key, None)
        # A card that is gone for good leaves no ring behind.
        for ring_key in [key for key in self._rings if key not in minute]:
            if not any(self._rings[ring_key].records(int(now) - RING_S + 1, int(now)).strip(b"\xff")):
                del self._rings[ring_key]

    # --- what is asked --------------------------------------------------------------------------

    def piece(
        self, kind: SampleKind, subject: str, start_at: float, end_at: float, most: int, names: Sequence[str]
    ) -> SeriesPiece:
        """Part of a series in at most `most` steps, from the finest samples that reach back that far."""
        now = self._scheduler.now()
        ring = self._rings.get((kind.name, subject))
        is_short = end_at - start_at <= _SHORT_S
        if (
            start_at > now - RING_S
            and ring is not None
            and ring.since is not None
            and (is_short or ring.since <= start_at)
        ):
            base_s = 1
        else:
            base_s = MINUTE_S if start_at >= now - KEPT_S[MINUTE_S] else TEN_MINUTES_S
        step_s = base_s * max(1, -int(-(end_at - start_at) // (base_s * most)))
        first, last = int(start_at // step_s), -int(-end_at // step_s)
        while last - first > most:
            step_s += base_s
            first, last = int(start_at // step_s), -int(-end_at // step_s)
        first_at, last_at = first * step_s, last * step_s
        if base_s == 1 and ring is not None:
            data = ring.records(first_at, last_at)
        else:
            data = self._file.records(kind, subject, base_s, first_at, last_at)
            bucket = self._minute.get((kind.name, subject))
            if base_s == MINUTE_S and bucket is not None and first_at <= self._minute_at < last_at:
                size = kind.record.size
                place = (self._minute_at - first_at) // MINUTE_S * size
                data = data[:place] + kind.pack(bucket.values()) + data[place + size :]
        return SeriesPiece(float(first_at), step_s, fold_records(kind, data, step_s // base_s, names))

    def subjects(self, kind: SampleKind, start_at: float, end_at: float) -> list[str]:
        """What there are samples of, by name."""
        kept = self._file.subjects(kind, int(start_at), int(end_at))
        return sorted({*kept, *(subject for name, subject in self._rings if name == kind.name)})

    def curves(self, run: str, most: int, names: Sequence[str]) -> list[tuple[str, SeriesPiece]]:
        """The curve of a run on each of its cards, by UUID."""
        mine = {uuid: curve for (handle, uuid), curve in self._curves.items() if handle == run}
        if not mine:
            mine = {curve.uuid: curve.series for curve in self._file.curves([run], CARD)}
        found = []
        for uuid, curve in sorted(mine.items()):
            group = max(1, -(-len(curve) // most))
            columns = fold_records(CARD, curve.pack(), group, names)
            found.append((uuid, SeriesPiece(curve.start_at, curve.step_s * group, columns)))
        return found

    def holders(self, uuid: str, start_at: float, end_at: float, most: int) -> list[tuple[str, float, float | None]]:
        """Runs that used a card, newest first: handle, first instant and last one, None while it runs."""
        now = [
            (run, curve.start_at, None)
            for (run, card), curve in self._curves.items()
            if card == uuid and curve.start_at < end_at and run in self._scheduler.state.open_runs
        ]
        going_on = {run for run, _, _ in now}
        past = self._file.holders(uuid, start_at, end_at, most)
        return [*sorted(now, key=lambda one: -one[1]), *(one for one in past if one[0] not in going_on)][:most]


def _values(sample: GpuSample, joules: float | None) -> Values:
    return card_values(
        sample.utilisation,
        sample.memory_utilisation,
        sample.temperature_c,
        sample.vram_used_mib,
        sample.power_w,
        joules,
    )
