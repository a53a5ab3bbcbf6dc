"""Reads real NVIDIA GPUs through NVML. The only importer of pynvml (distribution `nvidia-ml-py`).

The library is initialised once and kept: bringing a card up costs seconds, and repeated
initialisation has been seen to hang. It is repeated only after it failed or lost its driver.

Codes 9, 12 and 28 mean a machine without NVIDIA GPUs, which is not an error; every other failure to
initialise is a broken node, reported as the reading's error.
"""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gpusched.gpu import gateway, mig_layout, procinfo
from gpusched.gpu.device import Device, DriverGone
from gpusched.gpu.faults import PATH, KernelLog, XidListener
from gpusched.gpu.gateway import SLOW_S, Gateway, text_of
from gpusched.gpu.topology import NOWHERE, Topology
from gpusched.model.cluster import GpuReading, GpuSample, PowerLimit
from gpusched.model.mig import MigOrder
from gpusched.model.units import is_digits, plural
from gpusched.model.value import replace

LOOK_S = 30.0
"""Interval between checks of the file."""

_NAME = "libnvidia-ml.so"
_VERSION = re.compile(r"Kernel Module\s.*?\s(\d+(?:\.\d+)+)\s")

Stamp = tuple[int, int, int]


@dataclass(slots=True)
class LibraryFile:
    """The NVML file that this process has loaded, as it was at that time."""

    path: str
    stamp: Stamp
    looked_at: float = float("-inf")

    @classmethod
    def of_this_process(cls, maps: str = "/proc/self/maps") -> LibraryFile | None:
        """Find it in the process's memory map; None when unknown."""
        try:
            with open(maps, encoding="utf-8", errors="surrogateescape") as file:
                paths = [line.split(None, 5)[5].rstrip("\n") for line in file if _NAME in line]
        except (OSError, IndexError):
            return None
        stamp = _stamp(paths[0]) if paths else None
        return None if stamp is None else cls(paths[0], stamp)

    def was_replaced(self, now: float) -> bool:
        """Whether the file is gone or was replaced. Args: now: monotonic seconds."""
        if now - self.looked_at < LOOK_S:
            return False
        self.looked_at = now
        return _stamp(self.path) != self.stamp


def _stamp(path: str) -> Stamp | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def loaded_version(path: str = "/proc/driver/nvidia/version") -> str | None:
    """Version of the kernel module; None when it is not loaded."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            found = _VERSION.search(file.read())
    except OSError:
        return None
    return found[1] if found else None


RETRY_S = 10.0
"""Interval between attempts to initialise a library that failed."""

_HIDDEN_MIB = 512
"""Excess of memory in use over that of listed processes that triggers a search for other openers of the card."""

_KEEPER = "nvidia-persist"
"""NVIDIA's own daemon opens every card without using any."""


class NvmlSource:
    """All GPUs of this machine, restricted by the daemon's CUDA_VISIBLE_DEVICES if set."""

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        kernel_log: str = PATH,
    ) -> None:
        self._log_path = kernel_log
        self._log: KernelLog | None = None
        self._limit = environ.get(VARIABLE)
        self._clock = clock
        self._monotonic = monotonic
        self._nvml: Gateway | None = None
        self._devices: list[Device] = []
        self._topology: Topology | None = None
        self._xids: XidListener | None = None
        self._library: LibraryFile | None = None
        self._openers: dict[str, tuple[int, ...]] = {}
        self._openers_at = float("-inf")
        self._driver_version: str | None = None
        self._binding_note: str | None = None
        self._failure: int | str | None = None
        self._retry_at = float("-inf")
        self._outcomes: dict[str, tuple[int, str | None]] = {}
        """By card, the last order for its layout, and why it was given up."""

    def carry_out(self, orders: Sequence[MigOrder], is_wanted: Callable[[], bool]) -> None:
        """Make layouts, each order once; the next reading has the outcome. Raises: `mig_layout.Abandoned`.

        Args: is_wanted: whether to continue, asked before every step.
        """
        new = [one for one in orders if self._outcomes.get(one.uuid, (0, None))[0] != one.number]
        if not new:
            return
        # Where the card is reset, this process must not have it open; and all that is known of it is out of date after.
        self.close()
        try:
            nvml = Gateway(importlib.import_module("pynvml"))
        except (ImportError, AttributeError):
            return  # the reading says so
        _, code = nvml.ask("nvmlInit")
        if code:
            return
        try:
            for order in new:
                why = mig_layout.why_not_permitted() or mig_layout.carry_out(nvml, order, is_wanted)
                self._outcomes[order.uuid] = order.number, why
        finally:
            nvml.ask("nvmlShutdown")

    def read(self) -> GpuReading:
        """Read all devices once; a failing device is reported individually."""
        at, now = self._clock(), self._monotonic()
        if self._nvml is None and now >= self._retry_at:
            self._failure = self._connect()
            if self._failure is not None:
                self._retry_at = now + RETRY_S
        if self._failure is not None:
            return _refusal(at, self._failure)
        if self._library is not None and self._library.was_replaced(now):
            # The loaded library works for a while, but no new process can use the GPUs: report it before one tries.
            self.close()
            return GpuReading(at, "nvml", error="the NVIDIA driver's library was replaced; reading it again")
        try:
            read = [device.read_all(now) for device in self._devices]
        except DriverGone:
            self.close()
            return GpuReading(at, "nvml", error="the NVIDIA driver was unloaded or reloaded; retrying soon")
        samples = tuple(self._with_outcome(card) for card, *_ in read)
        samples = self._with_openers(self._with_faults(self._placed(samples, now), now), now)
        notes = []
        if self._limit is not None:
            chosen = visible_indexes(self._limit, [device.uuid for device in self._devices])
            samples = tuple(sample for sample in samples if sample.index in chosen)
            notes.append(_limit_note(self._limit, chosen, len(self._devices)))
        instances = [(card, found) for card in samples for found in _of_card(card, read)]
        samples += tuple(replace(found, numa=card.numa) for card, found in instances)
        if self._binding_note is not None:
            notes.append(self._binding_note)
        log_trouble = self._log.trouble if self._log else None
        return GpuReading(
            at, "nvml", samples, None, self._driver_version, tuple(notes), log_trouble, self._faults_until(at)
        )

    def power_limit(self, uuid: str) -> PowerLimit | str:
        """As `PowerLimits`."""
        found = self._device(uuid)
        return found if isinstance(found, str) else found.power_limit()

    def set_power_limit(self, uuid: str, limit_w: float) -> str | None:
        """As `PowerLimits`."""
        found = self._device(uuid)
        return found if isinstance(found, str) else found.set_power_limit(limit_w)

    def _device(self, uuid: str) -> Device | str:
        found = next((device for device in self._devices if device.uuid == uuid), None)
        return gateway.error_text(gateway.IS_LOST) if found is None else found

    def _with_outcome(self, sample: GpuSample) -> GpuSample:
        if sample.mig is None:
            return sample
        number, failure = self._outcomes.get(sample.uuid, (0, None))
        state = replace(sample.mig, why_not=mig_layout.why_not_permitted(), order=number, failure=failure)
        return replace(sample, mig=state)

    def _placed(self, samples: tuple[GpuSample, ...], now: float) -> tuple[GpuSample, ...]:
        if self._topology is None:
            return samples
        spots = self._topology.spots(now, [found for device in self._devices if (found := device.present)])
        placed = []
        for sample in samples:
            spot = spots.get(sample.index, NOWHERE)
            placed.append(replace(sample, link_group=spot.link_group, numa=spot.numa))
        return tuple(placed)

    def _with_faults(self, samples: tuple[GpuSample, ...], now: float) -> tuple[GpuSample, ...]:
        """Add new faults to the samples; listening begins after the first reading of the devices."""
        if self._xids is None:
            return samples
        if self._log is None:
            self._log = KernelLog(self._log_path, clock=self._clock, monotonic=self._monotonic)
        present = [found for device in self._devices if (found := device.present)]
        # The log first: faults in between are then reported twice rather than lost.
        logged = self._log.take({sample.pci_bus_id: sample.uuid for sample in samples if sample.pci_bus_id})
        heard = self._xids.take(now, present)
        return tuple(
            replace(sample, xids=(*logged.get(sample.uuid, ()), *heard.get(sample.uuid, ())))
            if sample.uuid in logged or sample.uuid in heard
            else sample
            for sample in samples
        )

    def _faults_until(self, at: float) -> float | None:
        """Instant before which all faults have been received, for a reading that began `at`; None: no source works."""
        events_until = None if self._xids is None else self._xids.drained_at
        log_until = at if self._log is not None and self._log.trouble is None else None
        return min((until for until in (events_until, log_until) if until is not None), default=None)

    def _with_openers(self, samples: tuple[GpuSample, ...], now: float) -> tuple[GpuSample, ...]:
        """Add processes that may hold memory beyond that of listed ones."""
        asked = {sample.uuid: f"/dev/nvidia{sample.minor}" for sample in samples if _has_hidden_use(sample)}
        if not asked:
            self._openers, self._openers_at = {}, float("-inf")
            return samples
        if now - self._openers_at >= SLOW_S or not asked.keys() <= self._openers.keys():
            found = procinfo.openers(asked.values())
            self._openers = {uuid: found[path] for uuid, path in asked.items()}
            self._openers_at = now
        told = []
        for sample in samples:
            listed = {process.pid for process in sample.processes or ()}
            pids = [pid for pid in self._openers.get(sample.uuid, ()) if pid not in listed]
            known = (procinfo.describe(pid, None) for pid in pids)
            openers = tuple(one for one in known if not (one.name or "").startswith(_KEEPER))
            told.append(replace(sample, openers=openers) if openers else sample)
        return tuple(told)

    def close(self) -> None:
        xids, self._xids = self._xids, None
        if xids is not None:
            xids.close()
        kernel_log, self._log = self._log, None
        if kernel_log is not None:
            kernel_log.close()
        nvml, self._nvml = self._nvml, None
        self._devices, self._topology, self._library = [], None, None
        if nvml is not None:
            nvml.ask("nvmlShutdown")

    def _connect(self) -> int | str | None:
        """Initialise; returns None, an NVML code, or a sentence."""
        try:
            module = importlib.import_module("pynvml")
            nvml = Gateway(module)
        except ImportError as error:
            return f"the Python package nvidia-ml-py cannot be imported: {error}"
        except AttributeError:
            return f"the module pynvml ({module.__file__}) is not that of nvidia-ml-py"
        _, code = nvml.ask("nvmlInit")
        if code:
            return code
        count, code = nvml.ask("nvmlDeviceGetCount")
        if code:
            nvml.ask("nvmlShutdown")
            return code
        self._nvml = nvml
        self._devices = [Device(nvml, index) for index in range(int(count))]
        self._library = LibraryFile.of_this_process()
        self._topology = Topology(nvml)
        self._xids = XidListener(nvml, self._clock)
        version, _ = nvml.ask("nvmlSystemGetDriverVersion")
        self._driver_version = None if version is None else text_of(version)
        if nvml.constant("nvmlMemory_v2") is None:
            where = getattr(module, "__file__", "pynvml")
            self._binding_note = (
                f"an old pynvml hides nvidia-ml-py ({where}); install gpusched in a separate environment"
            )
        return None


def _of_card(card: GpuSample, read: list[tuple[GpuSample, ...]]) -> tuple[GpuSample, ...]:
    return next((found[1:] for found in read if found[0].uuid == card.uuid), ())


def _has_hidden_use(sample: GpuSample) -> bool:
    if sample.vram_used_mib is None or sample.minor is None or sample.unified_memory or sample.mig_enabled:
        return False
    listed_mib = sum(process.vram_mib or 0 for process in sample.processes or ())
    return sample.vram_used_mib - listed_mib > _HIDDEN_MIB


def _refusal(at: float, failure: int | str) -> GpuReading:
    if failure in gateway.NO_GPU_CODES:
        # No fault: jobs without GPUs run. But there are signs of a GPU, or it would not have been queried.
        return GpuReading(at, "none", notes=(gateway.error_text(int(failure)),))
    if isinstance(failure, str):
        return GpuReading(at, "nvml", error=failure)
    version = loaded_version() if failure == gateway.VERSIONS_DIFFER else None
    which = f" (loaded: {version})" if version else ""
    return GpuReading(at, "nvml", error=gateway.error_text(failure) + which)


def _limit_note(value: str, chosen: frozenset[int], count: int) -> str:
    kept = ", ".join(str(index) for index in sorted(chosen)) or "none"
    return (
        f"CUDA_VISIBLE_DEVICES={value!r} in the daemon's environment limits it to these of {plural(count, 'GPU')}, "
        f"counted by PCI bus: {kept}"
    )


VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_indexes(value: str, uuids: Sequence[str | None]) -> frozenset[int]:
    """Indexes allowed by the variable, by CUDA's rules.

    Entries are indexes or prefixes of UUIDs. The first that matches no device, or several, ends the
    list; a device named twice leaves none. Indexes follow PCI bus order, as NVML's do.

    Args: uuids: by index; None for a device with an unknown UUID.
    """
    chosen: list[int] = []
    for entry in value.split(","):
        index = _resolve(entry.strip(), uuids)
        if index is None:
            break
        chosen.append(index)
    return frozenset(chosen) if len(set(chosen)) == len(chosen) else frozenset()


def _resolve(entry: str, uuids: Sequence[str | None]) -> int | None:
    if is_digits(entry):
        return int(entry) if len(entry) < 6 and int(entry) < len(uuids) else None
    if not entry.startswith("GPU-"):
        return None
    matches = [index for index, uuid in enumerate(uuids) if uuid is not None and uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None
