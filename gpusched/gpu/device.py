"""One NVIDIA GPU behind NVML: any call may fail on any device, so each field fails by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpusched.gpu import procinfo
from gpusched.gpu.gateway import (
    ABSENT,
    DRIVER_NOT_LOADED,
    FUNCTION_NOT_FOUND,
    IS_LOST,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    SLOW_S,
    UNINITIALIZED,
    VERSION_MISMATCH,
    Gateway,
    Present,
    ceil_mib,
    error_text,
    text_of,
)
from gpusched.gpu.mig import Instances, read_profiles
from gpusched.model.cluster import GpuProcess, GpuSample, PowerLimit
from gpusched.model.mig import MigState
from gpusched.model.value import replace

_MIB = 1 << 20
_NOT_AVAILABLE = 2**64 - 1
_GONE = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED})
_RESERVE_MAX_MIB = 1024
_NAMELESS = "GPU-unknown-at-index-"


def nameless(index: int) -> str:
    """Placeholder UUID of a card that was lost before its UUID was read."""
    return f"{_NAMELESS}{index}"


def is_nameless(uuid: str) -> bool:
    """Whether this is the placeholder UUID of a card that was lost before its UUID was read."""
    return uuid.startswith(_NAMELESS)


_UNCORRECTED, _VOLATILE, _SLOWDOWN = 1, 0, 1

Ask = Callable[..., tuple[Any, int]]
"""Calls the library for this card: a value and 0, or None and an error code."""


@dataclass(frozen=True, slots=True)
class Modes:
    """None: not reported by the driver. A mode whose reading fails later keeps its last value."""

    mig: bool | None = None
    mig_pending: bool | None = None
    can_mig: bool = False
    compute: int = 0
    display: bool = False
    ecc_errors: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    slowdown_c: float | None = None
    power_limit_w: float | None = None


def read_modes(ask: Ask, before: Modes) -> Modes:
    mig, mig_pending, can_mig = before.mig, before.mig_pending, before.can_mig
    found, code = ask("nvmlDeviceGetMigMode")
    if code == 0:
        mig, mig_pending, can_mig = bool(found[0]), bool(found[1]), True
    elif code in ABSENT:
        mig, mig_pending, can_mig = False, None, False
    compute, _ = ask("nvmlDeviceGetComputeMode")
    display, _ = ask("nvmlDeviceGetDisplayActive")
    errors, code = ask("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE)
    pending, failed = _repairs(ask, before)
    slowdown_c, _ = ask("nvmlDeviceGetTemperatureThreshold", _SLOWDOWN)
    limit_mw, limit_code = ask("nvmlDeviceGetEnforcedPowerLimit")
    kept_w = None if limit_code in ABSENT else before.power_limit_w
    return Modes(
        mig=mig,
        mig_pending=mig_pending,
        can_mig=can_mig,
        compute=before.compute if compute is None else int(compute),
        display=bool(display),
        ecc_errors=int(errors) if code == 0 else None if code in ABSENT else before.ecc_errors,
        remap_pending=pending,
        remap_failed=failed,
        slowdown_c=before.slowdown_c if slowdown_c is None else float(slowdown_c),
        power_limit_w=kept_w if limit_code else limit_mw / 1000,
    )


def _repairs(ask: Ask, before: Modes) -> tuple[bool | None, bool | None]:
    """Whether a memory repair awaits a reset, and whether one has failed."""
    rows, code = ask("nvmlDeviceGetRemappedRows")
    if code == 0:
        return bool(rows[2]), bool(rows[3])
    if code not in ABSENT:
        return before.remap_pending, before.remap_failed
    # Cards before Ampere retire whole pages, and never report that they cannot.
    pages, code = ask("nvmlDeviceGetRetiredPagesPendingStatus")
    if code == 0:
        return bool(pages), None
    return (None, None) if code in ABSENT else (before.remap_pending, None)


class DriverGone(Exception):
    """The library has lost its driver and must be reinitialised."""


class _Lost(Exception):
    """This device no longer answers."""


@dataclass(frozen=True, slots=True)
class _Identity:
    uuid: str
    name: str
    pci_bus_id: str | None
    minor: int | None
    capability: float | None = None


class Device:
    """Reads one device; remembers its identity, so that it can still be named when lost."""

    def __init__(
        self,
        nvml: Gateway,
        index: int,
        host_memory_mib: Callable[[], tuple[int, int] | None] = procinfo.host_memory_mib,
    ) -> None:
        self._nvml = nvml
        self._index = index
        self._host_memory_mib = host_memory_mib
        self._handle: Any = None
        self._identity: _Identity | None = None
        self._modes = Modes()
        self._modes_at = float("-inf")
        self._retry_at = float("-inf")
        self._has_rates: bool | None = None
        self._has_memory_v2 = nvml.constant("nvmlMemory_v2") is not None
        self._reserve_mib: int | None = None
        self._process_calls: dict[str, str] = {}
        self._has_energy = True
        """False once the driver said that the card does not count."""
        self._sm_seen_us = 0
        self._instances = Instances(self._call, self._processes, SLOW_S)
        self._mig: MigState | None = None

    @property
    def uuid(self) -> str | None:
        """The device's UUID if it was ever read."""
        return self._identity.uuid if self._identity else None

    @property
    def present(self) -> Present | None:
        """The device in the form that other readers query; None while it does not answer."""
        if self._handle is None or self._identity is None:
            return None
        return Present(self._identity.uuid, self._index, self._handle, self._identity.pci_bus_id)

    def power_limit(self) -> PowerLimit | str:
        """The limit that was set; why it cannot be read, as a clause."""
        limit_mw, code = self._try("nvmlDeviceGetPowerManagementLimit")
        if code:
            return refusal_text(code)
        bounds, code = self._try("nvmlDeviceGetPowerManagementLimitConstraints")
        return refusal_text(code) if code else PowerLimit(limit_mw / 1000, bounds[0] / 1000)

    def set_power_limit(self, limit_w: float) -> str | None:
        """Set the limit; returns why that failed, as a clause."""
        _, code = self._try("nvmlDeviceSetPowerManagementLimit", round(limit_w * 1000))
        self._modes_at = float("-inf")
        return refusal_text(code) if code else None

    def _try(self, name: str, *arguments: Any) -> tuple[Any, int]:
        """Call a function outside a reading: a loss is found by the next reading."""
        if self._handle is None:
            return None, IS_LOST
        return self._nvml.ask(name, self._handle, *arguments)

    def read_all(self, now: float) -> tuple[GpuSample, ...]:
        """Return a sample of the card and, with MIG on, of each instance. Args, Raises: as `read`."""
        sample = self.read(now)
        if not sample.mig_enabled or self._handle is None:
            self._instances.forget()
            return (sample,)
        try:
            instances = self._instances.read(now, self._handle, sample)
        except _Lost:
            return (self._absent(IS_LOST, now),)
        return replace(sample, mig_instances=len(instances)), *instances

    def read(self, now: float) -> GpuSample:
        """Return one sample. Args: now: monotonic seconds. Raises: DriverGone."""
        try:
            if self._handle is None:
                code = self._open() if now >= self._retry_at else IS_LOST
                if code:
                    return self._absent(code, now)
            if now - self._modes_at >= SLOW_S:
                self._modes = self._read_modes()
                self._mig = self._read_mig()
                self._modes_at = now
            sample = self._sample()
            had_rates, self._has_rates = self._has_rates, sample.utilisation is not None
            if had_rates is not None and had_rates is not self._has_rates:
                # They are gone with MIG on: it may have been switched just now.
                self._modes = self._read_modes()
                sample = self._sample()
            return sample
        except _Lost:
            return self._absent(IS_LOST, now)

    # --- identity -------------------------------------------------------------------------------

    def _open(self) -> int:
        handle, code = self._nvml.ask("nvmlDeviceGetHandleByIndex", self._index)
        if code:
            return code
        uuid, code = self._nvml.ask("nvmlDeviceGetUUID", handle)
        if code:
            return code
        name, pci, minor = (
            self._ask(function, handle)
            for function in ("nvmlDeviceGetName", "nvmlDeviceGetPciInfo", "nvmlDeviceGetMinorNumber")
        )
        bus_id = None if pci is None else text_of(pci.busId)
        found = self._ask("nvmlDeviceGetCudaComputeCapability", handle)
        capability = None if found is None else int(found[0]) + int(found[1]) / 10
        shown = "unknown GPU" if name is None else text_of(name)
        self._identity = _Identity(text_of(uuid), shown, bus_id, minor, capability)
        self._handle = handle
        self._modes_at = float("-inf")
        return 0

    def _absent(self, code: int, now: float) -> GpuSample:
        if code in _GONE:
            raise DriverGone
        if self._handle is not None or now >= self._retry_at:
            self._handle = None
            self._retry_at = now + SLOW_S if code == IS_LOST else now
        known = self._identity or _Identity(nameless(self._index), "unknown GPU", None, None)
        return GpuSample(
            uuid=known.uuid,
            index=self._index,
            name=known.name,
            pci_bus_id=known.pci_bus_id,
            minor=known.minor,
            is_lost=code == IS_LOST,
            error=error_text(code),
        )

    def _read_modes(self) -> Modes:
        def ask(name: str, *arguments: Any) -> tuple[Any, int]:
            return self._call(name, self._handle, *arguments)

        return read_modes(ask, self._modes)

    def _read_mig(self) -> MigState | None:
        """What the card could be divided into: asked for once, and again while the driver does not say."""
        if not self._modes.can_mig or (self._mig is not None and self._mig.profiles):
            return self._mig if self._modes.can_mig else None
        generation = self._ask("nvmlDeviceGetArchitecture", self._handle)
        is_reset = generation is not None and generation == self._nvml.constant("NVML_DEVICE_ARCH_AMPERE")
        return MigState(read_profiles(self._nvml, self._call, self._handle), is_reset)

    # --- fields ---------------------------------------------------------------------------------

    def _call(self, name: str, *arguments: Any, **options: Any) -> tuple[Any, int]:
        value, code = self._nvml.ask(name, *arguments, **options)
        if code == IS_LOST:
            raise _Lost
        if code in _GONE:
            raise DriverGone
        return value, code

    def _ask(self, name: str, *arguments: Any) -> Any:
        return self._call(name, *arguments)[0]

    def _sample(self) -> GpuSample:
        assert self._identity is not None
        memory = self._memory()
        rates = self._ask("nvmlDeviceGetUtilizationRates", self._handle)
        power_mw = self._ask("nvmlDeviceGetPowerUsage", self._handle)
        energy_mj = self._energy_mj()
        processes = self._processes(self._handle, memory.total_mib)
        if processes is not None and len(processes) > 1 and not self._modes.mig:
            processes = self._with_sm(processes)
        reserved_mib, used_mib = memory.reserved_mib, memory.used_mib
        if memory.counts_reserve and used_mib is not None:
            reserved_mib = self._learn_reserve(used_mib, processes)
            used_mib -= min(used_mib, reserved_mib)
        return GpuSample(
            uuid=self._identity.uuid,
            index=self._index,
            name=self._identity.name,
            vram_total_mib=memory.total_mib,
            vram_reserved_mib=reserved_mib,
            vram_used_mib=used_mib,
            utilisation=None if rates is None else min(1.0, rates.gpu / 100),
            memory_utilisation=None if rates is None else min(1.0, rates.memory / 100),
            temperature_c=self._temperature(),
            power_w=None if power_mw is None else power_mw / 1000,
            processes=processes,
            pci_bus_id=self._identity.pci_bus_id,
            minor=self._identity.minor,
            mig_enabled=bool(self._modes.mig),
            compute_mode=self._modes.compute,
            display_active=self._modes.display,
            ecc_errors=self._modes.ecc_errors,
            remap_pending=self._modes.remap_pending,
            remap_failed=self._modes.remap_failed,
            slowdown_c=self._modes.slowdown_c,
            mig_pending=self._modes.mig_pending,
            unified_memory=memory.is_unified,
            energy_mj=energy_mj,
            power_limit_w=self._modes.power_limit_w,
            mig=self._mig,
            cuda_capability=self._identity.capability,
        )

    def _energy_mj(self) -> int | None:
        if not self._has_energy:
            return None
        value, code = self._call("nvmlDeviceGetTotalEnergyConsumption", self._handle)
        self._has_energy = code not in ABSENT
        return None if code else int(value)

    def _with_sm(self, processes: tuple[GpuProcess, ...]) -> tuple[GpuProcess, ...]:
        """Add how long the kernels of each process ran since the last look."""
        found, code = self._call("nvmlDeviceGetProcessUtilization", self._handle, self._sm_seen_us)
        if code:
            # Not even while nothing runs: the driver then answers NOT_FOUND.
            return tuple(replace(process, sm=0.0) for process in processes) if code == NOT_FOUND else processes
        self._sm_seen_us = max((int(one.timeStamp) for one in found), default=self._sm_seen_us)
        percents: dict[int, list[int]] = {}
        for one in found:
            # Drivers have been seen to fill unused entries with pid 0 and figures beyond 100.
            if one.pid > 0 and one.smUtil <= 100:
                percents.setdefault(one.pid, []).append(one.smUtil)
        means = {pid: sum(amounts) / len(amounts) / 100 for pid, amounts in percents.items()}
        # A process that is missing from the list did not run.
        return tuple(replace(process, sm=means.get(process.pid, 0.0)) for process in processes)

    def _temperature(self) -> float | None:
        value, code = self._call("nvmlDeviceGetTemperature", self._handle, 0)
        if code == FUNCTION_NOT_FOUND:  # announced to go in CUDA 14
            value = self._ask("nvmlDeviceGetTemperatureV", self._handle, 0)
        return None if value is None else float(value)

    def _memory(self) -> _Memory:
        code = 0
        if self._has_memory_v2:
            version = self._nvml.constant("nvmlMemory_v2")
            found, code = self._call("nvmlDeviceGetMemoryInfo", self._handle, version=version)
            if code == 0:
                return _Memory(found.total // _MIB, ceil_mib(found.used), ceil_mib(found.reserved))
            if code in (FUNCTION_NOT_FOUND, VERSION_MISMATCH):
                self._has_memory_v2 = False
        if not self._has_memory_v2:
            found, code = self._call("nvmlDeviceGetMemoryInfo", self._handle)
            if code == 0:
                return _Memory(found.total // _MIB, ceil_mib(found.used), counts_reserve=True)
        # Only a whole card may turn out to have no memory of its own; a MIG one says the same.
        if code == NOT_SUPPORTED and self._modes.mig is False:
            host = self._host_memory_mib()
            if host is not None:
                total_mib, available_mib = host
                return _Memory(total_mib, total_mib - available_mib, is_unified=True)
        return _Memory()

    def _learn_reserve(self, used_mib: int, processes: tuple[GpuProcess, ...] | None) -> int:
        """Learn the driver's own share, where the old call includes it: the memory in use on an empty card."""
        if processes == () and used_mib <= _RESERVE_MAX_MIB:
            self._reserve_mib = used_mib if self._reserve_mib is None else min(self._reserve_mib, used_mib)
        return self._reserve_mib or 0

    # --- processes ------------------------------------------------------------------------------

    def _processes(self, handle: Any, total_mib: int | None) -> tuple[GpuProcess, ...] | None:
        """All processes of the card or its instance, one entry per pid; None when the lists are incomplete or
        implausible."""
        held: dict[int, int | None] = {}
        for kind in ("Compute", "Graphics", "MPSCompute"):
            entries, code = self._list(handle, kind)
            if code and (kind == "Compute" or code not in ABSENT):
                return None
            for entry in entries or ():
                amount = _amount(entry.usedGpuMemory)
                # A process with both kinds of work is in both lists with the same figure.
                known = [figure for figure in (amount, held.get(entry.pid)) if figure is not None]
                held[entry.pid] = max(known, default=None)
        # One driver series swapped pids and sizes under an unchanged version number.
        for pid, amount in held.items():
            if pid <= 0 or (amount is not None and total_mib is not None and amount > total_mib):
                return None
            if not procinfo.is_alive(pid):
                return None
        return tuple(procinfo.describe(pid, amount) for pid, amount in sorted(held.items()))

    def _list(self, handle: Any, kind: str) -> tuple[Any, int]:
        base = f"nvmlDeviceGet{kind}RunningProcesses"
        names = [self._process_calls[kind]] if kind in self._process_calls else [f"{base}_v3", f"{base}_v2", base]
        entries, code = None, FUNCTION_NOT_FOUND
        for name in names:
            entries, code = self._call(name, handle)
            if code != FUNCTION_NOT_FOUND:
                self._process_calls[kind] = name
                break
        return entries, code


@dataclass(frozen=True, slots=True)
class _Memory:
    total_mib: int | None = None
    used_mib: int | None = None
    reserved_mib: int = 0
    counts_reserve: bool = False
    """The memory in use includes the driver's reserve."""
    is_unified: bool = False


def _amount(size: int | None) -> int | None:
    return None if size is None or size == _NOT_AVAILABLE else ceil_mib(size)


def refusal_text(code: int) -> str:
    """Why the driver did not read or set a power limit, as a clause."""
    if code == NO_PERMISSION:
        return "only root may set it"
    return "it has no power limit that can be set" if code in ABSENT else error_text(code)
