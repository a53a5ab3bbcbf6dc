"""Reads AMD GPUs through AMD SMI. The only importer of amdsmi (extra `amd`), whose wheel needs ROCm's library.

Cards are numbered as ROCR numbers them, by the kernel's KFD node, because that is what ROCR_VISIBLE_DEVICES means by a
number; `amd-smi` goes by PCI address, which is usually the same. A card is known by its UUID as HIP has it, `GPU-` and
16 hexadecimal digits. Cards without one, and partitions that share one, are known by their PCI address.

The library mixes units and words: sizes in bytes or MB, degrees or thousandths, `N/A` for a number. Each function has
failed on some card, so each field fails by itself; unknown is None.
"""

from __future__ import annotations

import importlib
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from gpusched.gpu import procinfo
from gpusched.gpu.device import DriverGone, is_nameless, nameless
from gpusched.gpu.gateway import SLOW_S, ceil_mib
from gpusched.model.cluster import GpuProcess, GpuReading, GpuSample, is_amd
from gpusched.model.units import is_digits, plural
from gpusched.model.value import replace

VARIABLE = "ROCR_VISIBLE_DEVICES"
RETRY_S = 10.0

_NOT_SUPPORTED, _NO_PERMISSION, _NOT_FOUND, _NOT_INITIALISED, _NO_SLOT, _NO_DRIVER = 2, 10, 31, 32, 33, 34
_LOST = frozenset({_NOT_FOUND, _NO_SLOT})
_GONE = frozenset({_NOT_INITIALISED, _NO_DRIVER})
_ABSENT = frozenset({_NOT_FOUND, _NO_DRIVER})
"""Answers to the initialisation on a machine without AMD GPUs."""
_UNKNOWN_ERROR = 0xFFFFFFFE
_UNKNOWN = -1
"""In place of the library's code where it raised something else."""
_SENTENCES = {
    _NO_PERMISSION: (
        "the AMD driver refuses access to this user (no permission); add it to the groups render and video"
    ),
    _NOT_FOUND: "the GPU is lost: it does not answer",
    _NO_SLOT: "the GPU is lost: it does not answer",
    _NO_DRIVER: "the AMD driver is not loaded; load it with: sudo modprobe amdgpu",
}
_MILLIDEGREES = 1000
_MOST_W = 5000.0


def error_text(code: int) -> str:
    """Explain an error code of AMD SMI to the owner of a pending job."""
    is_known = 0 < code < _UNKNOWN_ERROR
    return _SENTENCES.get(code, f"AMD SMI reports error {code}" if is_known else "AMD SMI reports an unknown error")


@dataclass(frozen=True, slots=True)
class _Slow:
    """What changes rarely, and why the card is known as it is."""

    power_limit_w: float | None = None
    slowdown_c: float | None = None
    ecc_errors: int | None = None


class _Library:
    """Calls amdsmi and turns its exceptions into codes."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def ask(self, name: str, *arguments: Any) -> tuple[Any, int]:
        """Call a function: its value and 0, or None and a code."""
        function = getattr(self._module, name, None)
        if function is None:
            return None, _NOT_SUPPORTED
        try:
            return function(*arguments), 0
        except Exception as error:
            # Its wrappers raise whatever the parsing of an unexpected answer raises.
            code = getattr(error, "err_code", None)
            return None, abs(code) if isinstance(code, int) and code else _UNKNOWN

    def word(self, kind: str, name: str) -> Any:
        """A member of one of its enumerations; None in a version without it."""
        return getattr(getattr(self._module, kind, None), name, None)


@dataclass(slots=True)
class _Card:
    """One card or partition of one, remembered so that it can be named when lost."""

    handle: Any
    number: int
    """In the library's list."""
    uuid: str
    index: int
    name: str
    bus_id: str | None
    minor: int | None
    numa: int | None
    partition: str | None
    link_group: int | None = None
    """Cards of one group reach each other over XGMI."""
    slow: _Slow = _Slow()
    slow_at: float = float("-inf")


class AmdSource:
    """All AMD GPUs of this machine, restricted by the daemon's ROCR_VISIBLE_DEVICES if set.

    Args: is_wanted: whether the settings name this source, so that a missing package is an error; many processors have
    AMD graphics not used for computing. sysfs: where the kernel shows PCI devices.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        is_wanted: bool = True,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        sysfs: str = "/sys/bus/pci/devices",
    ) -> None:
        self._limit = environ.get(VARIABLE)
        self._is_wanted = is_wanted
        self._clock = clock
        self._monotonic = monotonic
        self._sysfs = sysfs
        self._library: _Library | None = None
        self._cards: list[_Card] = []
        self._version: str | None = None
        self._failure: str | int | None = None
        self._retry_at = float("-inf")

    def read(self) -> GpuReading:
        """Read all cards once; a failing one is reported individually."""
        at, now = self._clock(), self._monotonic()
        if self._library is None and now >= self._retry_at:
            self._failure = self._connect()
            if self._failure is not None:
                self._retry_at = now + RETRY_S
        library = self._library
        if library is None:
            if isinstance(self._failure, str) and not self._is_wanted:
                return GpuReading(at, "none", notes=(self._failure,))
            return _refusal(at, self._failure)
        try:
            samples = tuple(self._sample(library, card, now) for card in self._cards)
            if any(is_nameless(one.uuid) and not one.is_lost for one in samples):
                # It was lost when the cards were listed, and answers now.
                self._cards = self._list(library, [card.handle for card in self._by_listing()])
                samples = tuple(self._sample(library, card, now) for card in self._cards)
        except DriverGone:
            self.close()
            return GpuReading(at, "amdsmi", error="the AMD driver was unloaded or reloaded; retrying soon")
        notes = [
            f"GPU {card.index} is partitioned ({card.partition}); gpusched reads that, and does not change it"
            for card in self._cards
            if card.partition not in (None, "SPX", "N/A")
        ]
        if self._limit is not None:
            chosen = visible(self._limit, self._cards_by_index())
            samples = tuple(sample for sample in samples if sample.index in chosen)
            kept = ", ".join(map(str, sorted(chosen))) or "none"
            count = plural(len(self._cards), "GPU")
            notes.append(f"{VARIABLE}={self._limit} restricts the daemon to these of {count}: {kept}")
        return GpuReading(at, "amdsmi", samples, None, self._version, tuple(notes))

    def close(self) -> None:
        library, self._library = self._library, None
        self._cards = []
        if library is not None:
            library.ask("amdsmi_shut_down")

    def _by_listing(self) -> list[_Card]:
        return sorted(self._cards, key=lambda card: card.number)

    def _cards_by_index(self) -> list[str]:
        return [card.uuid for card in sorted(self._cards, key=lambda one: one.index)]

    # --- identity -------------------------------------------------------------------------------

    def _connect(self) -> str | int | None:
        """Initialise and list the cards; returns None, a code, or a sentence."""
        try:
            library = _Library(importlib.import_module("amdsmi"))
        except ModuleNotFoundError as error:
            if error.name != "amdsmi":
                return f"the Python package amdsmi cannot be imported: {error}"
            from gpusched.extras import install_command  # hardly ever needed

            return f"the Python package amdsmi is not installed; install it with: {install_command('amd')}"
        except Exception as error:
            # Without the library its wrapper prints a line and raises KeyError('libamd_smi.so').
            if "libamd_smi" in str(error):
                return "ROCm's library libamd_smi.so is not installed; install ROCm's package amd-smi-lib"
            return f"the Python package amdsmi cannot be imported: {type(error).__name__}: {error}"
        _, code = library.ask("amdsmi_init")
        if code:
            return code
        handles, code = library.ask("amdsmi_get_processor_handles")
        if code or not handles:
            library.ask("amdsmi_shut_down")
            return code or _NOT_FOUND
        self._library = library
        self._cards = self._list(library, handles)
        driver, _ = library.ask("amdsmi_get_gpu_driver_info", handles[0])
        self._version = _text(driver, "driver_version")
        return None

    def _list(self, library: _Library, handles: list[Any]) -> list[_Card]:
        """The cards in ROCR's order, or the library's if one of them does not tell its place."""
        nodes = [_number(library.ask("amdsmi_get_gpu_kfd_info", handle)[0], "node_id") for handle in handles]
        places = sorted(range(len(handles)), key=lambda at: 0 if None in nodes else nodes[at] or 0)
        order = {number: index for index, number in enumerate(places)}
        serials = [_hip_uuid(library, handle) for handle in handles]
        counts = Counter(serials)
        found = (library.ask("amdsmi_get_gpu_device_bdf", handle) for handle in handles)
        bus_ids = [None if code else str(bus_id).lower() for bus_id, code in found]
        cards: list[_Card] = []
        for number, (handle, bus_id) in enumerate(zip(handles, bus_ids, strict=True)):
            asic, _ = library.ask("amdsmi_get_gpu_asic_info", handle)
            partition, code = library.ask("amdsmi_get_gpu_compute_partition", handle)
            numa, numa_code = library.ask("amdsmi_topo_get_numa_node_number", handle)
            serial = serials[number]
            index = order[number]
            same = sum(one.bus_id == bus_id for one in cards)
            place = f"AMD-{bus_id}" + (f"-{same}" if same else "") if bus_id else nameless(index)
            cards.append(
                _Card(
                    handle=handle,
                    number=number,
                    uuid=serial if serial is not None and counts[serial] == 1 else place,
                    index=index,
                    name=_text(asic, "market_name") or "unknown GPU",
                    bus_id=bus_id,
                    # Partitions have their own nodes, and which belongs to which is unknown.
                    minor=self._render_minor(bus_id) if bus_ids.count(bus_id) == 1 else None,
                    numa=int(numa) if not numa_code and isinstance(numa, int) and numa < 1024 else None,
                    partition=str(partition) if not code and partition else None,
                )
            )
        _link(library, cards)
        return sorted(cards, key=lambda one: one.index)

    def _render_minor(self, bus_id: str | None) -> int | None:
        """N of its /dev/dri/renderDN."""
        try:
            names = os.listdir(f"{self._sysfs}/{bus_id}/drm") if bus_id else []
        except OSError:
            names = []
        numbers = [int(name.removeprefix("renderD")) for name in names if re.fullmatch(r"renderD\d+", name)]
        return numbers[0] if len(numbers) == 1 else None

    # --- fields ---------------------------------------------------------------------------------

    def _sample(self, library: _Library, card: _Card, now: float) -> GpuSample:
        def ask(name: str, *arguments: Any) -> tuple[Any, int]:
            value, code = library.ask(name, card.handle, *arguments)
            if code in _GONE:
                raise DriverGone
            return value, code

        vram = library.word("AmdSmiMemoryType", "VRAM")
        total, total_code = ask("amdsmi_get_gpu_memory_total", vram)
        if total_code in _LOST:
            return replace(_named(card), is_lost=True, error=error_text(total_code))
        used, used_code = ask("amdsmi_get_gpu_memory_usage", vram)
        total_mib = None if total_code or not total else int(total) >> 20
        if now - card.slow_at >= SLOW_S:
            card.slow, card.slow_at = _read_slow(library, ask), now
        activity, _ = ask("amdsmi_get_gpu_activity")
        power, _ = ask("amdsmi_get_power_info")
        energy, _ = ask("amdsmi_get_energy_count")
        processes, code = ask("amdsmi_get_gpu_process_list")
        return replace(
            _named(card),
            vram_total_mib=total_mib,
            vram_used_mib=None if used_code or used is None else ceil_mib(used),
            utilisation=_fraction(activity, "gfx_activity"),
            memory_utilisation=_fraction(activity, "umc_activity"),
            temperature_c=_temperature(library, ask, "CURRENT"),
            power_w=_power_w(power),
            processes=None if code else _processes(processes, total_mib),
            ecc_errors=card.slow.ecc_errors,
            slowdown_c=card.slow.slowdown_c,
            energy_mj=_energy_mj(energy),
            power_limit_w=card.slow.power_limit_w,
        )


Ask = Callable[..., tuple[Any, int]]
"""Calls the library for one card: a value and 0, or None and a code."""


def _link(library: _Library, cards: list[_Card]) -> None:
    xgmi = library.word("AmdSmiLinkType", "AMDSMI_LINK_TYPE_XGMI")
    for at, card in enumerate(cards):
        for other in cards[:at]:
            found, _ = library.ask("amdsmi_topo_get_link_type", other.handle, card.handle)
            if xgmi is not None and _number(found, "type") == int(xgmi):
                group = other.index if other.link_group is None else other.link_group
                other.link_group = card.link_group = group
                break


def _named(card: _Card) -> GpuSample:
    return GpuSample(
        uuid=card.uuid,
        index=card.index,
        name=card.name,
        pci_bus_id=card.bus_id,
        minor=card.minor,
        numa=card.numa,
        link_group=card.link_group,
    )


def _refusal(at: float, failure: str | int | None) -> GpuReading:
    if isinstance(failure, str):
        return GpuReading(at, "amdsmi", error=failure)
    if failure is None or failure in _ABSENT:
        note = error_text(_NO_DRIVER) if failure == _NO_DRIVER else "the AMD driver finds no GPU"
        return GpuReading(at, "none", notes=(note,))
    return GpuReading(at, "amdsmi", error=error_text(failure))


def _hip_uuid(library: _Library, handle: Any) -> str | None:
    """UUID as HIP and ROCR have it. Older versions tell only the number that it is made of."""
    found, _ = library.ask("amdsmi_get_gpu_enumeration_info", handle)
    uuid = (_text(found, "hip_uuid") or "").replace("gpu-", "GPU-")
    if is_amd(uuid) and int(uuid[4:], 16):
        return uuid
    asic, _ = library.ask("amdsmi_get_gpu_asic_info", handle)
    try:
        serial = int(_text(asic, "asic_serial") or "", 16)
    except ValueError:
        return None
    return f"GPU-{serial:016x}" if 0 < serial < 1 << 64 else None


def _read_slow(library: _Library, ask: Ask) -> _Slow:
    cap, _ = ask("amdsmi_get_power_cap_info")
    microwatts = _number(cap, "power_cap")
    errors, _ = ask("amdsmi_get_gpu_total_ecc_count")
    return _Slow(
        power_limit_w=None if not microwatts else microwatts / 1e6,
        slowdown_c=_temperature(library, ask, "CRITICAL"),
        ecc_errors=_number(errors, "uncorrectable_count"),
    )


def _temperature(library: _Library, ask: Ask, metric: str) -> float | None:
    """Of the hottest spot, which is what makes the card throttle; of its edge on cards without that sensor."""
    for sensor in ("HOTSPOT", "JUNCTION", "EDGE"):
        kind = library.word("AmdSmiTemperatureType", sensor)
        value, code = ask("amdsmi_get_temp_metric", kind, library.word("AmdSmiTemperatureMetric", metric))
        if kind is not None and not code and isinstance(value, (int, float)) and value > 0:
            return value / 1000 if value >= _MILLIDEGREES else float(value)
    return None


def _power_w(power: Any) -> float | None:
    """The name of the figure differs between generations of cards; the others say N/A or 0."""
    for key in ("current_socket_power", "socket_power", "average_socket_power"):
        value = _number(power, key)
        if value and value < _MOST_W:
            return float(value)
    return None


def _energy_mj(energy: Any) -> int | None:
    """The counter, as it is: it has been seen to run backwards (amdsmi#115), which its reader must tolerate."""
    count = _number(energy, "energy_accumulator")
    count = _number(energy, "power") if count is None else count
    resolution = energy.get("counter_resolution") if isinstance(energy, dict) else None
    if not count or not isinstance(resolution, (int, float)):
        return None
    return int(count * resolution / 1000)  # microjoules


def _processes(entries: Any, total_mib: int | None) -> tuple[GpuProcess, ...] | None:
    """All processes of the card; None when the list is implausible."""
    held: dict[int, int | None] = {}
    for entry in entries or ():
        pid = _number(entry, "pid")
        if not pid:
            continue
        size = _number(entry.get("memory_usage"), "vram_mem") or _number(entry, "mem")
        amount = None if size is None else ceil_mib(size)
        if (amount is not None and total_mib is not None and amount > total_mib) or not procinfo.is_alive(pid):
            return None
        known = [figure for figure in (amount, held.get(pid)) if figure is not None]
        held[pid] = max(known, default=None)
    return tuple(procinfo.describe(pid, amount) for pid, amount in sorted(held.items()))


def _number(document: Any, key: str) -> int | None:
    """A number that is one: the library says N/A, or the largest of its type, where it knows none."""
    value = document.get(key) if isinstance(document, dict) else None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return None
    return None if value in (0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF) else value


def _fraction(document: Any, key: str) -> float | None:
    percent = _number(document, key)
    return None if percent is None else min(1.0, percent / 100)


def _text(document: Any, key: str) -> str | None:
    value = document.get(key) if isinstance(document, dict) else None
    return value if isinstance(value, str) and value not in ("", "N/A") else None


def visible(value: str, uuids: list[str]) -> frozenset[int]:
    """Indexes that ROCR_VISIBLE_DEVICES allows: numbers or UUIDs; the first that is not a card ends the list."""
    chosen: list[int] = []
    for entry in value.split(","):
        word = entry.strip()
        if is_digits(word) and len(word) < 6 and int(word) < len(uuids):
            chosen.append(int(word))
            continue
        matches = [index for index, uuid in enumerate(uuids) if word and uuid.lower() == word.lower()]
        if len(matches) != 1:
            break
        chosen += matches
    return frozenset(chosen)
