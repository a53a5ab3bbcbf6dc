"""A module that behaves like amdsmi 7.0 over cards that a test describes; see `FakeAmdSmi.module`.

Answers have the shape, the units and the words of the wheel on PyPI. No card was asked for any of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum
from types import ModuleType
from typing import Any

MIB = 1 << 20


class AmdSmiException(Exception):
    """As the library's."""


class AmdSmiLibraryException(AmdSmiException):
    """As the library's: the code is in `err_code`."""

    def __init__(self, err_code: int) -> None:
        super().__init__(err_code)
        self.err_code = abs(err_code)


class AmdSmiMemoryType(IntEnum):
    """As the library's."""

    VRAM = 0
    VIS_VRAM = 1
    GTT = 2


class AmdSmiLinkType(IntEnum):
    """As the library's."""

    AMDSMI_LINK_TYPE_INTERNAL = 0
    AMDSMI_LINK_TYPE_PCIE = 1
    AMDSMI_LINK_TYPE_XGMI = 2


class AmdSmiTemperatureType(IntEnum):
    """As the library's: two names of one sensor."""

    EDGE = 0
    HOTSPOT = 1
    JUNCTION = 1
    VRAM = 2


class AmdSmiTemperatureMetric(IntEnum):
    """As the library's."""

    CURRENT = 0
    CRITICAL = 5


@dataclass
class FakeCard:
    """One card. `codes` maps a function's name to the error it raises; `lost` makes every call raise 31."""

    serial: str = "0xF980F88EF31631A2"
    """As in `asic_serial`."""
    hip_uuid: str | None = "GPU-f980f88ef31631a2"
    """None: an older library, without the call."""
    name: str = "AMD Instinct MI300X"
    bdf: str = "0000:0C:00.0"
    node: int | str = 2
    """Of KFD; `N/A` on a card without one."""
    total_mib: int = 196592
    used_mib: int = 284
    busy: int | str = 0
    temperatures: dict[tuple[int, int], int] = field(default_factory=lambda: {(1, 0): 41, (1, 5): 100})
    """By sensor and metric; missing ones are not supported."""
    power: dict[str, Any] = field(
        default_factory=lambda: {"current_socket_power": 141, "average_socket_power": "N/A", "power_limit": 750000000}
    )
    cap_microwatts: int = 750_000_000
    energy: int = 4_750_896_266
    resolution: float = 15.3
    processes: list[tuple[int, int | None]] = field(default_factory=list)
    """pid and MiB of VRAM; None: N/A."""
    uncorrectable: int = 0
    partition: str = "SPX"
    numa: int = 0
    link: int | None = None
    """Cards with the same number are linked by XGMI."""
    lost: bool = False
    codes: dict[str, int] = field(default_factory=dict)


@dataclass
class FakeAmdSmi:
    """The library. `calls` counts what was asked; `missing` functions do not exist."""

    cards: list[FakeCard] = field(default_factory=list)
    init_code: int = 0
    missing: frozenset[str] = frozenset()
    calls: Counter[str] = field(default_factory=Counter)
    is_initialised: bool = False
    gone: bool = False
    """The driver was unloaded: calls answer that nothing is initialised."""

    def module(self) -> ModuleType:
        """The binding, to be put into `sys.modules` as `amdsmi`."""
        module = ModuleType("amdsmi")
        contents: dict[str, Any] = {
            "AmdSmiException": AmdSmiException,
            "AmdSmiLibraryException": AmdSmiLibraryException,
            "AmdSmiMemoryType": AmdSmiMemoryType,
            "AmdSmiLinkType": AmdSmiLinkType,
            "AmdSmiTemperatureType": AmdSmiTemperatureType,
            "AmdSmiTemperatureMetric": AmdSmiTemperatureMetric,
            "amdsmi_init": self._init,
            "amdsmi_shut_down": self._shut_down,
            "amdsmi_get_processor_handles": self._handles,
        }
        fields = {
            "amdsmi_get_gpu_asic_info": lambda card: {"market_name": card.name, "asic_serial": card.serial},
            "amdsmi_get_gpu_enumeration_info": _enumeration,
            "amdsmi_get_gpu_device_bdf": lambda card: card.bdf,
            "amdsmi_get_gpu_kfd_info": lambda card: {"kfd_id": 1, "node_id": card.node, "current_partition_id": 0},
            "amdsmi_get_gpu_compute_partition": lambda card: card.partition,
            "amdsmi_topo_get_numa_node_number": lambda card: card.numa,
            "amdsmi_get_gpu_driver_info": lambda card: {"driver_name": "amdgpu", "driver_version": "6.12.12"},
            "amdsmi_topo_get_link_type": _link,
            "amdsmi_get_gpu_memory_total": lambda card, kind: card.total_mib * MIB,
            "amdsmi_get_gpu_memory_usage": lambda card, kind: card.used_mib * MIB,
            "amdsmi_get_gpu_activity": lambda card: {
                "gfx_activity": card.busy,
                "umc_activity": card.busy,
                "mm_activity": "N/A",
            },
            "amdsmi_get_power_info": lambda card: card.power,
            "amdsmi_get_power_cap_info": lambda card: {"power_cap": card.cap_microwatts, "max_power_cap": 750_000_000},
            "amdsmi_get_energy_count": lambda card: {
                "energy_accumulator": card.energy,
                "counter_resolution": card.resolution,
                "timestamp": 1_712_024_507_665,
            },
            "amdsmi_get_temp_metric": _temperature,
            "amdsmi_get_gpu_process_list": lambda card: [_process(pid, mib) for pid, mib in card.processes],
            "amdsmi_get_gpu_total_ecc_count": lambda card: {
                "correctable_count": 3,
                "uncorrectable_count": card.uncorrectable,
                "deferred_count": 0,
            },
        }
        contents.update((name, self._field(name, get)) for name, get in fields.items())
        for name, value in contents.items():
            if name not in self.missing:
                setattr(module, name, value)
        return module

    def _init(self) -> None:
        self.calls["amdsmi_init"] += 1
        if self.init_code:
            raise AmdSmiLibraryException(self.init_code)
        self.is_initialised, self.gone = True, False

    def _shut_down(self) -> None:
        self.calls["amdsmi_shut_down"] += 1
        self.is_initialised = False

    def _handles(self) -> list[FakeCard]:
        if not self.is_initialised:
            raise AmdSmiLibraryException(32)
        return list(self.cards)

    def _field(self, name: str, get: Any) -> Any:
        def call(card: FakeCard, *arguments: Any) -> Any:
            self.calls[name] += 1
            code = 32 if self.gone or not self.is_initialised else 31 if card.lost else card.codes.get(name, 0)
            if code:
                raise AmdSmiLibraryException(code)
            return get(card, *arguments)

        return call


def _link(card: FakeCard, other: FakeCard) -> dict[str, int]:
    is_linked = card.link is not None and card.link == other.link
    return {"hops": 1, "type": int(AmdSmiLinkType(2 if is_linked else 1))}


def _enumeration(card: FakeCard) -> dict[str, Any]:
    if card.hip_uuid is None:
        raise AmdSmiLibraryException(2)
    return {"drm_render": 128, "drm_card": 0, "hsa_id": card.node, "hip_id": 0, "hip_uuid": card.hip_uuid}


def _temperature(card: FakeCard, sensor: AmdSmiTemperatureType, metric: AmdSmiTemperatureMetric) -> int:
    if (sensor, metric) not in card.temperatures:
        raise AmdSmiLibraryException(2)
    return card.temperatures[sensor, metric]


def _process(pid: int, mib: int | None) -> dict[str, Any]:
    size = "N/A" if mib is None else mib * MIB
    return {
        "name": "N/A",
        "pid": pid,
        "mem": size,
        "engine_usage": {"gfx": 0, "enc": 0},
        "memory_usage": {"gtt_mem": 0, "cpu_mem": 0, "vram_mem": size},
        "cu_occupancy": "N/A",
    }
