"""What the end of a run's output says about its failure: GPU memory that ran out, or the error that ended it.

Output belongs to the user and may hold anything: it is searched for fixed words only, without regular expressions,
whose time could grow faster than the text, and what is quoted of it is one line without control characters.
"""

from __future__ import annotations

import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
LONGEST_CAUSE = 200
"""Characters of a cause."""
_LINES = 40
"""Last lines that are searched for errors of programs other than Python."""
_TRACEBACK = "Traceback (most recent call last):"
_WRAPPERS = ("ChildFailedError", "CalledProcessError", "BrokenProcessPool", "ProcessRaisedException", "SystemExit")
"""Exceptions that only report another process's failure."""
_CONSEQUENCES = ("DistBackendError", "DistNetworkError", "ConnectionResetError", "BrokenPipeError", "EOFError")
"""Exceptions of the ranks that outlived the one that failed."""
_SHARED_CODE = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen ")
_ERRORS = (
    *("NCCL WARN", "NCCL error", "CUDA error", "CUDA_ERROR_", "cudaError", "CUBLAS_STATUS_", "CUDNN_STATUS_"),
    *("HIP error", "hipError", "Segmentation fault", "Bus error", "Illegal instruction", "core dumped"),
    *("terminate called", "what():", "panicked at", "panic: ", "Assertion ", "Execution halted"),
    *("command not found", ": not found", "No such file or directory", "Permission denied", "No space left on device"),
    *("Exec format error", "syntax error", "error:", "Error:", "ERROR", "fatal:", "FATAL", "Fatal "),
)


def read_tail(log_fd: int, begin: int) -> bytes:
    """The last 16 KiB behind `begin` (older text is from an earlier run); nothing of anything but a file."""
    try:
        status = os.fstat(log_fd)
        if not stat.S_ISREG(status.st_mode):
            return b""
        # The open file itself, even if its name refers to another by now.
        fd = os.open(f"/proc/self/fd/{log_fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if status.st_size < begin:
                begin = 0
            return os.pread(fd, TAIL_BYTES, max(begin, status.st_size - TAIL_BYTES))
        finally:
            os.close(fd)
    except OSError:
        return b""


def shows_oom(tail: bytes) -> bool:
    """Whether it contains a known message of GPU memory that ran out."""
    return any(words in tail for words in GPU_OOM)


def find_cause(tails: Sequence[bytes]) -> str | None:
    """The error that these ends of files report, as one line; None if none is known to be one.

    A traceback of Python counts most, above all of the exception that caused the others:
    `ValueError: no column 'x' (train.py:41 in main)`. Otherwise it is the last line with the words of an error.
    """
    texts = [_lines(tail) for tail in tails]
    raised = [found for lines in texts for found in _exceptions(lines)]
    for words in (_WRAPPERS + _CONSEQUENCES, _WRAPPERS, ()):
        for headline, place in reversed(raised):
            name = headline.partition(":")[0].rpartition(".")[2].strip()
            if name not in words:
                return _quoted(headline, place)
    # Error output comes last.
    for lines in reversed(texts):
        for line in reversed(lines[-_LINES:]):
            if any(words in line for words in _ERRORS):
                return _quoted(line, "")
    return None


def last_line(tails: Sequence[bytes]) -> str | None:
    """The last line of these ends of files; None if they have none."""
    lines = [line for tail in tails for line in _lines(tail)]
    if not lines:
        return None
    words = " ".join(lines[-1].split()).removeprefix("Error: ").removeprefix("FATAL: ")
    # Go's errors end with what has happened, and begin with what was about to be done.
    return words if len(words) <= LONGEST_CAUSE else f"{words[: LONGEST_CAUSE // 3]} ... {words[-LONGEST_CAUSE // 2 :]}"


def _lines(tail: bytes) -> list[str]:
    """Lines without colours and other control characters; a progress bar's carriage returns end lines, too."""
    text = tail.decode("utf-8", "replace").replace("\r", "\n")
    return [line for line in map(_printable, text.split("\n")) if line.strip()]


def _printable(line: str) -> str:
    if line.isprintable():
        return line
    first, *others = line.split("\x1b[")
    # A sequence ends with its first letter.
    rest = [piece[next((at + 1 for at, sign in enumerate(piece) if sign.isalpha()), 0) :] for piece in others]
    plain = "".join([first, *rest]).replace("\t", "    ")
    return "".join(sign for sign in plain if sign.isprintable())


def _exceptions(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Exceptions of tracebacks, in order: what was raised, and the last place in the user's own code."""
    for at, line in enumerate(lines):
        if _TRACEBACK not in line:
            continue
        # Ranks and workers write something before each of their lines.
        before = line[: line.index(_TRACEBACK)].removesuffix("Original ")
        places: list[str] = []
        for other in lines[at + 1 :]:
            if not other.startswith(before):
                continue
            rest = other[len(before) :]
            if rest.startswith((" ", "\t", "|", "+")):
                places += [rest.strip()] if rest.lstrip().startswith('File "') else []
                continue
            yield rest, _place(places)
            break


def _place(frames: Sequence[str]) -> str:
    """`train.py:41 in main` of the last frame outside of installed packages, or the last one."""
    own = [frame for frame in frames if not any(words in frame for words in _SHARED_CODE)]
    for frame in reversed(own or frames):
        path, _, rest = frame.removeprefix('File "').partition('", line ')
        number, _, function = rest.partition(", in ")
        if number.isdigit():
            name = path.rpartition("/")[2]
            return f"{name}:{number}" + (f" in {function}" if function and function != "<module>" else "")
    return ""


def _quoted(text: str, place: str) -> str:
    # Exceptions of a group are behind a bar.
    words = " ".join(text.lstrip(" |").split()).rstrip(" :")
    end = f" ({place})" if place and len(place) < LONGEST_CAUSE // 2 else ""
    room = LONGEST_CAUSE - len(end)
    return (words if len(words) <= room else words[: room - 3] + "...") + end
