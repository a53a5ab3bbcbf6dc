"""Sentences for NVML's error codes, shared by the real source and the simulated one."""

from __future__ import annotations

NO_GPU_CODES = frozenset({9, 12, 28})
"""Driver not loaded, library not found, GPU not found: the machine has no NVIDIA GPU, which is no fault."""

VERSIONS_DIFFER = 18
"""Of the library and the kernel module, as after an update."""

_SENTENCES = {
    9: "the NVIDIA driver is not loaded; load it with: sudo modprobe nvidia",
    12: "the library of the NVIDIA driver (libnvidia-ml.so.1) is not installed",
    28: "the NVIDIA driver finds no GPU",
    4: "the NVIDIA driver refuses access to this user (no permission)",
    15: "the GPU is lost: it has fallen off the bus or does not answer",
    16: "the GPU must be reset before it can be used again",
    17: "the operating system has blocked the request to the NVIDIA driver",
    VERSIONS_DIFFER: (
        "the NVIDIA driver was updated, but its old kernel module is still loaded: jobs that run go on, for new ones "
        "reboot or reload the nvidia modules when no process uses a GPU"
    ),
    999: "the NVIDIA driver reports an unknown error; in a container, its devices may have been taken away",
}


def sentence(code: int) -> str:
    """What an NVML error code means to somebody who waits for a GPU."""
    return _SENTENCES.get(code, f"the NVIDIA driver reports error {code}")
