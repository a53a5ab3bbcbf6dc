"""A module that behaves like pynvml over devices that a test describes; see `FakeNvml.module`."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable
from ctypes import POINTER, Structure, c_uint, c_void_p, cast
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

MIB = 1 << 20
NOT_AVAILABLE = 2**64 - 1


XID_EVENT = 8
_WAIT_S = 0.01
"""Between two looks of a listener whether it is to stop; the real library waits as long as it is asked to."""


class _Opaque(Structure):
    """What a handle points to."""


_Handle = POINTER(_Opaque)
"""As pynvml's: two handles of one device are not equal."""


class _Place(Structure):
    """Memory slices of a GPU instance."""

    _fields_ = (("start", c_uint), ("size", c_uint))


A100 = (
    *(("1g.10gb", 19, 1, 9728, 1, (0, 1, 2, 3, 4, 5, 6), 7), ("1g.10gb+me", 20, 1, 9728, 1, (0, 1, 2, 3, 4, 5, 6), 1)),
    *(("1g.20gb", 15, 1, 19968, 2, (0, 2, 4, 6), 4), ("2g.20gb", 14, 2, 19968, 2, (0, 2, 4), 3)),
    *(
        ("3g.40gb", 9, 3, 40192, 4, (0, 4), 2),
        ("4g.40gb", 5, 4, 40192, 4, (0,), 1),
        ("7g.80gb", 0, 7, 80896, 8, (0,), 1),
    ),
)
"""Kinds of MIG instances: name, number, slices, MiB, memory slices, where it may begin, how many. Source: NVIDIA's MIG
guide, supported profiles and `nvidia-smi mig -lgipp`."""


class NVMLError(Exception):
    """As pynvml's: the code is in `value`."""

    def __init__(self, value: int) -> None:
        super().__init__(f"code {value}")
        self.value = value


class NVMLLibraryMismatchError(Exception):
    """Raised by unversioned process calls on an old library; not an NVMLError there either."""


@dataclass
class FakeDevice:
    """One GPU. `codes` maps a function's name to the error it raises; `lost` makes every call raise 15.

    `unified` is a GPU whose memory is the host's: it answers NOT_SUPPORTED when asked for its own.
    """

    uuid: str | bytes
    name: str | bytes = "NVIDIA A100-SXM4-80GB"
    total_mib: int = 81920
    used_mib: int = 0
    reserved_mib: int = 500
    gpu_percent: int = 0
    temperature_c: int = 35
    power_mw: int = 60_000
    energy_mj: int | None = None
    """None, as for the limit: not supported."""
    power_limit_mw: int | None = None
    power_bounds_mw: tuple[int, int] | None = None
    """Lowest and highest limit that can be set; None: not supported."""
    sm: list[tuple[int, int, int]] = field(default_factory=list)
    """SM samples: pid, instant in microseconds, percent."""
    compute: list[tuple[int, int | None]] = field(default_factory=list)
    graphics: list[tuple[int, int | None]] = field(default_factory=list)
    mps: list[tuple[int, int | None]] = field(default_factory=list)
    minor: int = 0
    mig: bool = False
    mig_pending: bool | None = None
    """None: as `mig`."""
    ecc_errors: int | None = None
    """None, as for rows, pages and the threshold: not supported."""
    rows: tuple[int, int, int, int] | None = None
    """Remapped after corrected and uncorrected errors, pending, failed."""
    pages_pending: int | None = None
    slowdown_c: int | None = None
    compute_mode: int = 0
    display: bool = False
    lost: bool = False
    unified: bool = False
    capability: tuple[int, int] = (8, 0)
    links: dict[int, str | None] = field(default_factory=dict)
    """Link -> UUID at its far end (`switch` for a switch); None for one that is down. None at all: no NVLink."""
    numa: tuple[int, ...] | None = None
    instances: list[FakeDevice | None] = field(default_factory=list)
    """MIG instances by slot; None for an empty one."""
    gi: int = 0
    ci: int = 0
    slices: tuple[int, int] = (1, 1)
    """Of a MIG instance: slices of its GPU instance and of its compute instance."""
    kinds: tuple[tuple[str, int, int, int, int, tuple[int, ...], int], ...] = ()
    """Kinds of MIG instances that it can be divided into, see `A100`."""
    generation: int = 9
    """Hopper; 7 is Ampere."""
    mig_status: int = 0
    """What a switch of its MIG mode answers; anything but 0 leaves it pending."""
    place: int = 0
    """Of a MIG instance: its first memory slice."""
    kind: int | None = None
    """Of a MIG instance that was made here: number of its kind."""
    has_part: bool = True
    """Of a MIG instance: whether it has its compute instance, without which it is not listed."""
    gone: bool = False
    """Of a MIG instance: it was removed, and its handle means nothing any more."""
    codes: dict[str, int] = field(default_factory=dict)


@dataclass
class FakeNvml:
    """The library. `calls` counts what was asked; `missing` functions do not exist in the binding."""

    devices: list[FakeDevice] = field(default_factory=list)
    init_code: int = 0
    codes: dict[str, int] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()
    peers: set[frozenset[str]] = field(default_factory=set)
    """Pairs of UUIDs that reach each other over NVLink, as GetP2PStatus tells."""
    has_events: bool = False
    """Whether devices can be registered for XID events; see `raise_xid`."""
    calls: Counter[str] = field(default_factory=Counter)
    is_initialised: bool = False
    _devices: dict[int, FakeDevice] = field(default_factory=dict)
    """By address, of those whose handle was asked for."""
    _event_sets: list[_EventSet] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    made: int = 0
    """MIG instances made so far: one that is made again has another UUID."""
    before_step: Callable[[str], None] = lambda name: None
    """Called with the name of each function that changes a card, before it does."""
    is_stalled: bool = False
    _waits: threading.Condition = field(default_factory=threading.Condition)

    def module(self) -> ModuleType:
        """The binding, to be put into `sys.modules` as `pynvml`."""
        module = ModuleType("pynvml")
        contents: dict[str, Any] = {
            "NVMLError": NVMLError,
            "NVMLLibraryMismatchError": NVMLLibraryMismatchError,
            "nvmlMemory_v2": 0x02000028,
            "NVML_DEVICE_ARCH_AMPERE": 7,
            "NVML_GPU_INSTANCE_PROFILE_COUNT": 18,
            "NVML_COMPUTE_INSTANCE_PROFILE_COUNT": 9,
            "c_nvmlGpuInstance_t": _Handle,
            "c_nvmlComputeInstance_t": _Handle,
            "c_nvmlGpuInstancePlacement_t": _Place,
            "nvmlDeviceGetHandleByUUID": self._handle_by_uuid,
            "nvmlInit": self._init,
            "nvmlShutdown": self._shutdown,
            "nvmlSystemGetDriverVersion": self._global("nvmlSystemGetDriverVersion", lambda: "580.65.06"),
            "nvmlDeviceGetCount": self._global("nvmlDeviceGetCount", lambda: len(self.devices)),
            "nvmlDeviceGetHandleByIndex": self._handle,
            "nvmlDeviceGetMemoryInfo": self._memory,
            "nvmlDeviceGetP2PStatus": self._peer_status,
        }
        fields = {
            "nvmlDeviceGetUUID": lambda gpu: gpu.uuid,
            "nvmlDeviceGetName": lambda gpu: gpu.name,
            "nvmlDeviceGetMinorNumber": lambda gpu: gpu.minor,
            "nvmlDeviceGetCudaComputeCapability": lambda gpu: list(gpu.capability),
            "nvmlDeviceGetPciInfo": lambda gpu: SimpleNamespace(busId=f"00000000:{gpu.minor:02X}:00.0".encode()),
            "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=gpu.gpu_percent, memory=0),
            "nvmlDeviceGetTemperature": lambda gpu, sensor: gpu.temperature_c,
            "nvmlDeviceGetPowerUsage": lambda gpu: gpu.power_mw,
            "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: _told(gpu.energy_mj),
            "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: _told(gpu.power_limit_mw),
            "nvmlDeviceGetPowerManagementLimit": lambda gpu: _told(gpu.power_limit_mw),
            "nvmlDeviceGetPowerManagementLimitConstraints": lambda gpu: _told(gpu.power_bounds_mw),
            "nvmlDeviceSetPowerManagementLimit": _set_power_limit,
            "nvmlDeviceGetProcessUtilization": _sm_samples,
            "nvmlDeviceGetMigMode": lambda gpu: [
                int(gpu.mig),
                int(gpu.mig if gpu.mig_pending is None else gpu.mig_pending),
            ],
            "nvmlDeviceGetMaxMigDeviceCount": lambda gpu: 7,
            "nvmlDeviceGetMigDeviceHandleByIndex": lambda gpu, slot: self.handle_of(_instance(gpu, slot)),
            "nvmlDeviceGetGpuInstanceId": lambda gpu: gpu.gi,
            "nvmlDeviceGetComputeInstanceId": lambda gpu: gpu.ci,
            "nvmlDeviceGetAttributes_v2": lambda gpu: SimpleNamespace(
                gpuInstanceSliceCount=gpu.slices[0],
                computeInstanceSliceCount=gpu.slices[1],
                memorySizeMB=gpu.total_mib,
            ),
            "nvmlDeviceGetArchitecture": lambda gpu: gpu.generation,
            "nvmlDeviceSetMigMode": _set_mig_mode,
            "nvmlDeviceGetGpuInstanceProfileInfo": _profile_info,
            "nvmlDeviceGetGpuInstancePossiblePlacements": _possible_placements,
            "nvmlDeviceGetGpuInstances": self._gpu_instances,
            "nvmlDeviceCreateGpuInstanceWithPlacement": self._create_gpu_instance,
            "nvmlGpuInstanceGetComputeInstanceProfileInfo": _part_info,
            "nvmlGpuInstanceGetComputeInstances": self._parts,
            "nvmlGpuInstanceCreateComputeInstance": self._create_part,
            "nvmlComputeInstanceDestroy": _destroy_part,
            "nvmlGpuInstanceDestroy": self._destroy_gpu_instance,
            "nvmlDeviceGetTotalEccErrors": _ecc,
            "nvmlDeviceGetRemappedRows": lambda gpu: _told(gpu.rows),
            "nvmlDeviceGetRetiredPagesPendingStatus": lambda gpu: _told(gpu.pages_pending),
            "nvmlDeviceGetTemperatureThreshold": _threshold,
            "nvmlDeviceGetComputeMode": lambda gpu: gpu.compute_mode,
            "nvmlDeviceGetDisplayActive": lambda gpu: int(gpu.display),
            "nvmlDeviceGetNvLinkState": _link_state,
            "nvmlDeviceGetNvLinkRemotePciInfo": self._far_end,
            "nvmlDeviceGetMemoryAffinity": _memory_affinity,
            "nvmlDeviceGetComputeRunningProcesses_v3": lambda gpu: _processes(gpu.compute),
            "nvmlDeviceGetGraphicsRunningProcesses_v3": lambda gpu: _processes(gpu.graphics),
            "nvmlDeviceGetMPSComputeRunningProcesses_v3": lambda gpu: _processes(gpu.mps),
        }
        contents.update((name, self._field(name, get)) for name, get in fields.items())
        if self.has_events:
            contents["nvmlEventSetCreate"] = self._global("nvmlEventSetCreate", self._create_event_set)
            contents["nvmlDeviceRegisterEvents"] = self._register
            contents["nvmlEventSetWait_v2"] = self._wait
            contents["nvmlEventSetFree"] = self._free
        for name, value in contents.items():
            if name not in self.missing:
                setattr(module, name, value)
        return module

    def raise_xid(self, gpu: FakeDevice, xid: int, *, before_loss: bool = False) -> None:
        """Tell every listener of a fault; returns once each has dealt with it.

        Args: before_loss: the device falls off the bus when the event has been written, before anybody reads it.
        """
        with self._lock:
            listening = [one for one in self._event_sets if any(other is gpu for other in one.devices)]
            gpu.lost = gpu.lost or before_loss
            for one in listening:
                one.events.put((gpu, xid))
        if not self.is_stalled:
            for one in listening:
                one.events.join()

    def settle(self) -> None:
        """Return when every listener has begun a wait, found nothing, and begun another."""
        with self._waits:
            wanted = [(one, one.waits + 2) for one in self._event_sets]
            for one, _ in wanted:
                # The wait that goes on now and the one begun after it are over at once.
                one.events.put(None)
                one.events.put(None)
            self._waits.wait_for(
                lambda: self.is_stalled or all(one not in self._event_sets or one.waits >= at for one, at in wanted)
            )

    def stall(self, is_stalled: bool) -> None:
        """Whether listeners get no answer, as when their thread is not given the processor."""
        with self._waits:
            self.is_stalled = is_stalled
            self._waits.notify_all()

    def handle_of(self, gpu: FakeDevice) -> Any:
        """A new handle of the device."""
        self._devices[id(gpu)] = gpu
        return cast(c_void_p(id(gpu)), _Handle)

    def _device_of(self, handle: Any) -> FakeDevice:
        return self._devices[int(cast(handle, c_void_p).value or 0)]

    # --- events ---------------------------------------------------------------------------------

    def _create_event_set(self) -> _EventSet:
        self._event_sets.append(_EventSet())
        return self._event_sets[-1]

    def _register(self, handle: Any, kinds: int, event_set: _EventSet) -> None:
        assert kinds == XID_EVENT
        gpu = self._device_of(handle)
        self._check("nvmlDeviceRegisterEvents", gpu)
        event_set.devices.append(gpu)

    def _wait(self, event_set: _EventSet, timeout_ms: int) -> SimpleNamespace:
        event_set.finish()
        with self._waits:
            event_set.waits += 1
            self._waits.notify_all()
            self._waits.wait_for(lambda: not self.is_stalled)
        try:
            event = event_set.events.get(timeout=_WAIT_S)
        except queue.Empty:
            event = None
        else:
            event_set.is_busy = True
        if event is None:
            event_set.finish()
            with self._lock:
                # A lost device ends the wait only after its events were handed out.
                is_over = event_set.events.empty() and any(gpu.lost for gpu in event_set.devices)
            raise NVMLError(15 if is_over else 10)
        gpu, xid = event
        return SimpleNamespace(device=self.handle_of(gpu), eventType=XID_EVENT, eventData=xid)

    def _free(self, event_set: _EventSet) -> None:
        with self._lock:
            self._event_sets = [one for one in self._event_sets if one is not event_set]
        with self._waits:
            self._waits.notify_all()
        event_set.finish()
        while not event_set.events.empty():
            event_set.events.get()
            event_set.events.task_done()

    # --- MIG ------------------------------------------------------------------------------------

    def _handle_by_uuid(self, uuid: str) -> Any:
        self.calls["nvmlDeviceGetHandleByUUID"] += 1
        self._check("nvmlDeviceGetHandleByUUID")
        found = [gpu for gpu in self.devices if gpu.uuid == uuid]
        if not found:
            raise NVMLError(6)
        return self.handle_of(found[0])

    def _gpu_instances(self, gpu: FakeDevice, kind: int, array: Any, count: Any) -> int:
        _need_mig(gpu)
        found = [one for one in gpu.instances if one is not None and _kind_of(gpu, one) == kind]
        for at, one in enumerate(found):
            array[at] = self.handle_of(one)
        count._obj.value = len(found)
        return 0

    def _create_gpu_instance(self, gpu: FakeDevice, kind: int, place: Any) -> Any:
        _need_mig(gpu)
        name, _, slices, mib, size, starts, most = next(one for one in gpu.kinds if one[1] == kind)
        start, there = place._obj.start, [one for one in gpu.instances if one is not None]
        taken = {at for one in there for at in _covers(gpu, one)}
        wanted = set(range(start, start + size))
        alike = [one for one in there if _kind_of(gpu, one) == kind]
        used = sum(one.slices[0] for one in there)
        if start not in starts or wanted & taken or len(alike) >= most or used + slices > 7:
            raise NVMLError(23)
        self.made += 1
        made = FakeDevice(
            f"MIG-{self.made}",
            f"{gpu.name} MIG {name}",
            mib,
            slices=(slices, slices),
            gi=self.made,
            place=start,
            kind=kind,
            has_part=False,
        )
        slot = next((at for at, one in enumerate(gpu.instances) if one is None), len(gpu.instances))
        gpu.instances[slot : slot + 1] = [made]
        return self.handle_of(made)

    def _parts(self, instance: FakeDevice, kind: int, array: Any, count: Any) -> int:
        has_it = instance.has_part and kind == instance.slices[1]
        if has_it:
            array[0] = self.handle_of(instance)
        count._obj.value = int(has_it)
        return 0

    def _create_part(self, instance: FakeDevice, kind: int) -> Any:
        assert kind == instance.slices[0], "one that is smaller than its GPU instance"
        instance.has_part = True
        return self.handle_of(instance)

    def _destroy_gpu_instance(self, instance: FakeDevice) -> int:
        (card,) = [gpu for gpu in self.devices if any(one is instance for one in gpu.instances)]
        if instance.has_part or instance.compute:
            raise NVMLError(19)
        instance.gone = True
        card.instances[card.instances.index(instance)] = None
        return 0

    # --- devices --------------------------------------------------------------------------------

    def _init(self) -> None:
        self.calls["nvmlInit"] += 1
        if self.init_code:
            raise NVMLError(self.init_code)
        self.is_initialised = True

    def _shutdown(self) -> None:
        self.calls["nvmlShutdown"] += 1
        self._check("nvmlShutdown")
        self.is_initialised = False

    def _check(self, name: str, gpu: FakeDevice | None = None) -> None:
        if not self.is_initialised:
            raise NVMLError(1)
        code = self.codes.get(name) or (gpu.codes.get(name) if gpu else None)
        if gpu is not None and gpu.gone:
            code = 2
        if gpu is not None and gpu.lost:
            code = 15
        if code:
            raise NVMLError(code)

    def _global(self, name: str, get: Any) -> Any:
        def call() -> Any:
            self.calls[name] += 1
            self._check(name)
            return get()

        return call

    def _handle(self, index: int) -> Any:
        self.calls["nvmlDeviceGetHandleByIndex"] += 1
        gpu = self.devices[index]
        self._check("nvmlDeviceGetHandleByIndex", gpu)
        return self.handle_of(gpu)

    def _peer_status(self, handle: Any, other_handle: Any, what: int) -> int:
        self.calls["nvmlDeviceGetP2PStatus"] += 1
        gpu, other = self._device_of(handle), self._device_of(other_handle)
        self._check("nvmlDeviceGetP2PStatus", gpu)
        assert what == 2, "the index of NVLink"
        return 0 if frozenset((str(gpu.uuid), str(other.uuid))) in self.peers else 5

    def _far_end(self, gpu: FakeDevice, link: int) -> SimpleNamespace:
        (minor,) = [one.minor for one in self.devices if one.uuid == gpu.links[link]] or [0xFF]
        return SimpleNamespace(busId=f"00000000:{minor:02X}:00.0".encode())

    def _memory(self, handle: Any, version: int | None = None) -> SimpleNamespace:
        name = "nvmlDeviceGetMemoryInfo_v2" if version else "nvmlDeviceGetMemoryInfo"
        self.calls[name] += 1
        gpu = self._device_of(handle)
        self._check(name, gpu)
        if gpu.unified:
            raise NVMLError(3)
        total, used, reserved = gpu.total_mib * MIB, gpu.used_mib * MIB, gpu.reserved_mib * MIB
        if version:
            return SimpleNamespace(total=total, used=used, reserved=reserved)
        return SimpleNamespace(total=total, used=used + reserved)

    def _field(self, name: str, get: Any) -> Any:
        def call(handle: Any, *arguments: Any) -> Any:
            self.calls[name] += 1
            gpu = self._device_of(handle)
            if any(word in name for word in ("Create", "Destroy", "Set")):
                self.before_step(name)
            self._check(name, gpu)
            return get(gpu, *arguments)

        return call


@dataclass(eq=False)
class _EventSet:
    """What one listener is registered for, and the events that it has not fetched."""

    devices: list[FakeDevice] = field(default_factory=list)
    events: queue.Queue[tuple[FakeDevice, int] | None] = field(default_factory=queue.Queue)
    """None ends a wait as if its time were over."""
    waits: int = 0
    """Begun so far."""
    is_busy: bool = False
    """The event that was fetched last is being dealt with."""

    def finish(self) -> None:
        """The listener is done with the event that it fetched last."""
        if self.is_busy:
            self.is_busy = False
            self.events.task_done()


def _set_power_limit(gpu: FakeDevice, limit_mw: int) -> None:
    low_mw, high_mw = _told(gpu.power_bounds_mw)
    if not low_mw <= limit_mw <= high_mw:
        raise NVMLError(2)
    gpu.power_limit_mw = limit_mw


def _link_state(gpu: FakeDevice, link: int) -> int:
    if not gpu.links:
        raise NVMLError(3)
    if link not in gpu.links:
        raise NVMLError(2)
    return int(gpu.links[link] is not None)


def _instance(gpu: FakeDevice, slot: int) -> FakeDevice:
    found = gpu.instances[slot] if slot < len(gpu.instances) else None
    if found is None or not found.has_part:
        raise NVMLError(6)
    return found


def _need_mig(gpu: FakeDevice) -> None:
    if not gpu.mig:
        raise NVMLError(3)


def _kind_of(gpu: FakeDevice, instance: FakeDevice) -> int:
    if instance.kind is not None:
        return instance.kind
    name = str(instance.name).rpartition("MIG ")[2]
    return next(one[1] for one in gpu.kinds if one[0] == name)


def _covers(gpu: FakeDevice, instance: FakeDevice) -> range:
    size = next(one[4] for one in gpu.kinds if one[1] == _kind_of(gpu, instance))
    return range(instance.place, instance.place + size)


def _set_mig_mode(gpu: FakeDevice, mode: int) -> int:
    """The mode is pending where the switch needs a reset, or something uses the card."""
    if not gpu.kinds:
        raise NVMLError(3)
    if any(one is not None for one in gpu.instances) or gpu.compute:
        return 19
    if gpu.mig_status and bool(mode) is not gpu.mig:
        gpu.mig_pending = bool(mode)
        return gpu.mig_status
    gpu.mig, gpu.mig_pending = bool(mode), None
    return 0


def _profile_info(gpu: FakeDevice, number: int, version: int = 2) -> SimpleNamespace:
    if number >= len(gpu.kinds) or not gpu.mig:
        raise NVMLError(3)
    name, kind, slices, mib, _, _, most = gpu.kinds[number]
    return SimpleNamespace(
        id=kind, name=f"MIG {name}".encode(), sliceCount=slices, memorySizeMB=mib, instanceCount=most
    )


def _possible_placements(gpu: FakeDevice, kind: int, array: Any, count: Any) -> int:
    _, _, _, _, size, starts, _ = next(one for one in gpu.kinds if one[1] == kind)
    if array is not None:
        for at, start in enumerate(starts):
            array[at].start, array[at].size = start, size
    count._obj.value = len(starts)
    return 0


def _part_info(instance: FakeDevice, number: int, engines: int) -> SimpleNamespace:
    """Numbers of compute instances are those of their slices here, which they are not on a card."""
    sizes = (1, 2, 3, 4, 7)
    if number >= len(sizes) or sizes[number] > instance.slices[0]:
        raise NVMLError(3)
    size = sizes[number]
    return SimpleNamespace(id=size, sliceCount=size, instanceCount=instance.slices[0] // size)


def _destroy_part(instance: FakeDevice) -> int:
    if instance.compute:
        raise NVMLError(19)
    instance.has_part = False
    return 0


def _memory_affinity(gpu: FakeDevice, words: int, scope: int) -> list[int]:
    assert scope == 0, "of nodes"
    if gpu.numa is None:
        raise NVMLError(3)
    mask = [0] * words
    for node in gpu.numa:
        mask[node // 64] |= 1 << node % 64
    return mask


def _sm_samples(gpu: FakeDevice, since_us: int) -> list[SimpleNamespace]:
    found = [one for one in gpu.sm if one[1] > since_us]
    if not found:
        raise NVMLError(6)
    return [SimpleNamespace(pid=pid, timeStamp=at, smUtil=percent) for pid, at, percent in found]


def _told(value: Any) -> Any:
    if value is None:
        raise NVMLError(3)
    return value


def _ecc(gpu: FakeDevice, kind: int, counter: int) -> Any:
    assert (kind, counter) == (1, 0), "those that were not corrected, since the last reset"
    return _told(gpu.ecc_errors)


def _threshold(gpu: FakeDevice, kind: int) -> Any:
    assert kind == 1, "at which it slows down"
    return _told(gpu.slowdown_c)


def _processes(entries: list[tuple[int, int | None]]) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(pid=pid, usedGpuMemory=mib if mib is None or mib == NOT_AVAILABLE else mib * MIB)
        for pid, mib in entries
    ]
