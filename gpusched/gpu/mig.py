"""MIG instances of one card, each of which acts as a card with its own memory; and the kinds that it could have.

An instance shares its parent's temperature, power and faults. NVML does not report its utilisation. Recreated
instances have new UUIDs: a handle that no longer answers triggers a new listing at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from ctypes import byref, c_uint
from dataclasses import dataclass
from typing import Any

from gpusched.gpu.gateway import ABSENT, FUNCTION_NOT_FOUND, INVALID_ARGUMENT, NOT_FOUND, Gateway, ceil_mib, text_of
from gpusched.model.cluster import GpuProcess, GpuSample
from gpusched.model.mig import MigProfile
from gpusched.model.units import mig_index
from gpusched.model.value import replace

_MIB = 1 << 20
_PROFILE = re.compile(r"\bMIG (\S+)$")
_STALE = frozenset({INVALID_ARGUMENT, NOT_FOUND})

Call = Callable[..., tuple[Any, int]]
"""Calls the library: a value and 0, or None and an error code."""
Processes = Callable[[Any, "int | None"], "tuple[GpuProcess, ...] | None"]
"""Processes on the device of a handle with this much memory (MiB)."""


@dataclass(frozen=True, slots=True)
class _Instance:
    handle: Any
    slot: int
    uuid: str
    name: str
    profile: str
    gi: int | None
    ci: int | None


class Instances:
    """Reads the instances of one card; lists them again every `slow_s`."""

    def __init__(self, call: Call, processes: Processes, slow_s: float) -> None:
        self._call = call
        self._processes = processes
        self._slow_s = slow_s
        self._known: tuple[_Instance, ...] = ()
        self._known_at = float("-inf")

    def forget(self) -> None:
        self._known, self._known_at = (), float("-inf")

    def read(self, now: float, handle: Any, parent: GpuSample) -> tuple[GpuSample, ...]:
        """Return one sample per instance. Args: now: monotonic seconds; handle, parent: of the card."""
        if now - self._known_at >= self._slow_s:
            self._look(now, handle, parent)
        found = [self._sample(one, parent) for one in self._known]
        if None in found:
            self._look(now, handle, parent)
            found = [self._sample(one, parent) for one in self._known]
        return tuple(sample for sample in found if sample is not None)

    def _look(self, now: float, handle: Any, parent: GpuSample) -> None:
        most, code = self._call("nvmlDeviceGetMaxMigDeviceCount", handle)
        if code:
            if code in ABSENT:
                self._known = ()
            return  # else as it was: one answer that fails takes no card away
        found = []
        for slot in range(int(most)):
            instance, code = self._call("nvmlDeviceGetMigDeviceHandleByIndex", handle, slot)
            if code == 0:
                made = self._describe(instance, slot, parent)
                if made is not None:
                    found.append(made)
            elif code not in ABSENT and code not in _STALE:
                return
        self._known, self._known_at = tuple(found), now

    def _describe(self, handle: Any, slot: int, parent: GpuSample) -> _Instance | None:
        uuid, code = self._call("nvmlDeviceGetUUID", handle)
        if code:
            return None
        name, _ = self._call("nvmlDeviceGetName", handle)
        gi, _ = self._call("nvmlDeviceGetGpuInstanceId", handle)
        ci, _ = self._call("nvmlDeviceGetComputeInstanceId", handle)
        named = _PROFILE.search(text_of(name) if name is not None else "")
        profile = named[1] if named else self._profile(handle)
        return _Instance(handle, slot, text_of(uuid), f"{parent.name} MIG {profile}", profile, gi, ci)

    def _profile(self, handle: Any) -> str:
        """Profile in `nvidia-smi`'s notation; older drivers report only its parts."""
        parts, code = self._call("nvmlDeviceGetAttributes_v2", handle)
        if code:
            parts, code = self._call("nvmlDeviceGetAttributes", handle)
        if code:
            return "unknown"
        whole, part = int(parts.gpuInstanceSliceCount), int(parts.computeInstanceSliceCount)
        prefix = f"{part}c." if part < whole else ""
        return f"{prefix}{whole}g.{round(int(parts.memorySizeMB) / 1024)}gb"

    def _sample(self, one: _Instance, parent: GpuSample) -> GpuSample | None:
        """Sample one instance; None when it no longer exists."""
        # What the driver keeps for itself counts as used here: some tens of MiB, less than any baseline.
        memory, code = self._call("nvmlDeviceGetMemoryInfo", one.handle)
        if code in _STALE:
            return None
        total_mib = used_mib = None
        if code == 0:
            total_mib, used_mib = int(memory.total) // _MIB, ceil_mib(memory.used)
        return instance_of(
            parent,
            slot=one.slot,
            uuid=one.uuid,
            profile=one.profile,
            total_mib=total_mib,
            used_mib=used_mib,
            processes=self._processes(one.handle, total_mib),
            gi=one.gi,
            ci=one.ci,
        )


_KINDS_MAX = 32
"""NVML numbers the kinds of instances; 18 in 2026."""


def read_profiles(nvml: Gateway, call: Call, handle: Any) -> tuple[MigProfile, ...]:
    """The kinds of instances that a card can have, the smallest first; empty where the driver names none now.

    Source: NVML, nvmlDeviceGetGpuInstanceProfileInfo: a card lacks some of the numbers.
    """
    count = nvml.constant("NVML_GPU_INSTANCE_PROFILE_COUNT") or _KINDS_MAX
    found = []
    for number in range(count):
        info, code = call("nvmlDeviceGetGpuInstanceProfileInfo", handle, number)
        if code == FUNCTION_NOT_FOUND:
            info, code = call("nvmlDeviceGetGpuInstanceProfileInfo", handle, number, version=1)
        if code:
            continue
        name = text_of(getattr(info, "name", b"")).removeprefix("MIG ")
        starts, size = _placements(nvml, call, handle, info.id)
        found.append(
            MigProfile(
                name=name or f"{int(info.sliceCount)}g.{round(int(info.memorySizeMB) / 1024)}gb",
                id=int(info.id),
                slices=int(info.sliceCount),
                memory_mib=int(info.memorySizeMB),
                size=size,
                starts=starts,
                most=int(info.instanceCount),
            )
        )
    return tuple(sorted(found, key=lambda one: (one.slices, one.memory_mib, one.name)))


def _placements(nvml: Gateway, call: Call, handle: Any, profile_id: int) -> tuple[tuple[int, ...], int]:
    kind, count = nvml.type_of("c_nvmlGpuInstancePlacement_t"), c_uint(0)
    _, code = call("nvmlDeviceGetGpuInstancePossiblePlacements", handle, profile_id, None, byref(count))
    if code or kind is None or not count.value:
        return (), 0
    places = (kind * count.value)()
    _, code = call("nvmlDeviceGetGpuInstancePossiblePlacements", handle, profile_id, places, byref(count))
    if code:
        return (), 0
    found = list(places)[: count.value]
    return tuple(sorted(int(one.start) for one in found)), int(found[0].size)


def instance_of(
    parent: GpuSample,
    *,
    slot: int,
    uuid: str,
    profile: str,
    total_mib: int | None,
    used_mib: int | None,
    processes: tuple[GpuProcess, ...] | None,
    gi: int | None = None,
    ci: int | None = None,
) -> GpuSample:
    """Build an instance's sample from its own values and those inherited from its parent."""
    return replace(
        parent,
        uuid=uuid,
        index=mig_index(parent.index, slot),
        name=f"{parent.name} MIG {profile}",
        vram_total_mib=total_mib,
        vram_reserved_mib=0,
        vram_used_mib=used_mib,
        utilisation=None,
        memory_utilisation=None,
        processes=processes,
        mig_enabled=False,
        mig_pending=None,
        mig_instances=0,
        mig_parent=parent.uuid,
        mig_profile=profile,
        mig_gi=gi,
        mig_ci=ci,
        mig=None,
        link_group=None,
        power_w=None,
        energy_mj=None,
        power_limit_w=None,
        xids=(),
        openers=(),
    )
