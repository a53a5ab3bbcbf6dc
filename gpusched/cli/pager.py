"""Long output at a terminal goes through a pager, as git does it."""

from __future__ import annotations

import os
import sys

from gpusched.cli import tables

_DEFAULT = "less"


def page(text: str, is_wanted: bool = True) -> None:
    """Print a text; through the pager where it has more lines than the terminal."""
    size = tables.screen()
    is_long = size is not None and text.count("\n") >= size[0]
    pager = _pager() if is_wanted and is_long and tables.is_drawn() else ""
    if not pager or not _show(pager, text):
        sys.stdout.write(text)


def _pager() -> str:
    """The command line of the pager; empty for none."""
    for name in ("GPUSCHED_PAGER", "PAGER"):
        chosen = os.environ.get(name)
        if chosen is not None:
            return "" if chosen.strip() == "cat" else chosen.strip()
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return _DEFAULT if any(os.access(os.path.join(folder, _DEFAULT), os.X_OK) for folder in folders) else ""


def _show(pager: str, text: str) -> bool:
    """Have it shown; False when there is no such pager."""
    import signal
    import subprocess

    sys.stdout.flush()
    # Colours as they are, no pager for what fits, and the last page stays on the screen.
    env = {"LESS": "FRX", "LV": "-c", **os.environ}
    process = subprocess.Popen(pager, shell=True, stdin=subprocess.PIPE, env=env)
    # Ctrl-C is for the pager, which goes on.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.communicate(text.encode(sys.stdout.encoding or "utf-8", "backslashreplace"))
    finally:
        signal.signal(signal.SIGINT, before)
    return process.returncode not in (126, 127)
