"""Common ground of all readers of one NVML library: error codes and their sentences, calls without exceptions, text."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, DRIVER_NOT_LOADED = 1, 2, 3, 4, 6, 9
TIMEOUT, FUNCTION_NOT_FOUND, IS_LOST, VERSION_MISMATCH = 10, 13, 15, 25
NO_PERMISSION, RESET_REQUIRED, IN_USE, NO_ROOM = 4, 16, 19, 23
ABSENT = frozenset({NOT_SUPPORTED, NOT_FOUND, FUNCTION_NOT_FOUND})

SLOW_S = 30.0
"""Interval between readings of slowly changing values, and between attempts at a lost device."""

NO_GPU_CODES = frozenset({9, 12, 28})
"""Driver not loaded, library not found, GPU not found: the machine has no NVIDIA GPU, which is not an error."""

VERSIONS_DIFFER = 18
"""Library and kernel module differ in version, as after an update."""

_SENTENCES = {
    9: "the NVIDIA driver is not loaded; load it with: sudo modprobe nvidia",
    12: "the library of the NVIDIA driver (libnvidia-ml.so.1) is not installed",
    28: "the NVIDIA driver finds no GPU",
    NO_PERMISSION: "the NVIDIA driver refuses access to this user (no permission)",
    15: "the GPU is lost: it has fallen off the bus or does not answer",
    RESET_REQUIRED: "the GPU must be reset before it can be used again",
    IN_USE: "a program still uses the GPU",
    NO_ROOM: "the GPU has no room left for it",
    17: "the operating system has blocked the request to the NVIDIA driver",
    VERSIONS_DIFFER: (
        "the NVIDIA driver was updated, but its old kernel module is still loaded: running jobs continue; for new ones "
        "reboot or reload the nvidia modules when no process uses a GPU"
    ),
    999: "the NVIDIA driver reports an unknown error; in a container, its devices may have been taken away",
}


def error_text(code: int) -> str:
    """Explain an NVML error code to the owner of a pending job."""
    return _SENTENCES.get(code, f"the NVIDIA driver reports error {code}")


class Gateway:
    """Calls pynvml and turns its exceptions into codes."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._error: type[Exception] = module.NVMLError
        # Raised instead of FUNCTION_NOT_FOUND by calls that chose their own version.
        self._mismatch: type[Exception] = getattr(module, "NVMLLibraryMismatchError", module.NVMLError)

    def ask(self, name: str, *arguments: Any, **options: Any) -> tuple[Any, int]:
        """Call a function: its value and 0, or None and an error code."""
        function = getattr(self._module, name, None)
        if function is None:
            return None, FUNCTION_NOT_FOUND
        try:
            return function(*arguments, **options), 0
        except self._error as error:
            return None, int(getattr(error, "value", FUNCTION_NOT_FOUND)) or FUNCTION_NOT_FOUND
        except self._mismatch:
            return None, FUNCTION_NOT_FOUND
        except TypeError:
            return None, FUNCTION_NOT_FOUND if options else INVALID_ARGUMENT  # a binding without the option

    def type_of(self, name: str) -> Any:
        """A structure or handle type of the binding; None in a binding too old to define it."""
        return getattr(self._module, name, None)

    def constant(self, name: str) -> int | None:
        """A constant of the binding; None in a binding too old to define it."""
        value = getattr(self._module, name, None)
        return None if value is None else int(value)


@dataclass(frozen=True, slots=True)
class Present:
    """A GPU that answers: UUID, index, handle of the library, PCI address."""

    uuid: str
    index: int
    handle: Any
    pci_bus_id: str | None


def text_of(value: Any) -> str:
    """Decode a text of the library; old bindings return bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def ceil_mib(size: int) -> int:
    """Bytes as MiB, rounded up."""
    return -(-int(size) >> 20)
