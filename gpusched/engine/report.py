"""What the result of a run says beyond its exit code: texts that fit an event, memory that ran out."""

from __future__ import annotations

import os
import stat

from gpusched.engine.wire import TEXT_LIMIT

TAIL_BYTES = 16384
GPU_OOM = (
    b"CUDA out of memory",
    b"CUDA error: out of memory",
    b"CUDA_ERROR_OUT_OF_MEMORY",
    b"cudaErrorMemoryAllocation",
    b"torch.OutOfMemoryError",
    b"torch.cuda.OutOfMemoryError",
    b"RESOURCE_EXHAUSTED: Out of memory",
    b"CUBLAS_STATUS_ALLOC_FAILED",
    b"hipErrorOutOfMemory",
    b"HIP out of memory",
)


def tail_shows_oom(log_fd: int, begin: int) -> bool:
    """Whether the last 16 KiB behind `begin` (older text is of an earlier run) hold a known message."""
    try:
        status = os.fstat(log_fd)
        if not stat.S_ISREG(status.st_mode):
            return False
        # The open file itself, whatever has its name by now.
        fd = os.open(f"/proc/self/fd/{log_fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if status.st_size < begin:
                begin = 0
            at = max(begin, status.st_size - TAIL_BYTES)
            tail = os.pread(fd, TAIL_BYTES, at)
        finally:
            os.close(fd)
    except OSError:
        return False
    return any(words in tail for words in GPU_OOM)


def shortened(text: str) -> str:
    """At most so much of a text that the event fits into one atomic write."""
    return text if len(text) <= TEXT_LIMIT else text[: TEXT_LIMIT - 3] + "..."


def joined(names: list[str]) -> str:
    """As many names as fit, one a line, and how many more there were."""
    kept: list[str] = []
    for name in names:
        if sum(map(len, kept)) + len(kept) + len(name) > TEXT_LIMIT - 20:
            kept.append(f"and {len(names) - len(kept)} more")
            break
        kept.append(name)
    return "\n".join(kept)
