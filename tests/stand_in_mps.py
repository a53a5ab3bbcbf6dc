"""A stand-in for nvidia-cuda-mps-control: goes into the background with `-d`, quits when told, and records that.

As the real one it takes its folders from the environment, refuses to run twice in one, and names itself in a file.
"""

from __future__ import annotations

import os
from pathlib import Path

PROGRAM = """#!/bin/sh
umask 077
D=$CUDA_MPS_PIPE_DIRECTORY
pid=$D/nvidia-cuda-mps-control.pid
say() { echo "$*" >> "$CUDA_MPS_LOG_DIRECTORY/control.log"; }
case $1 in
-d)
    if [ -e "%(broken)s" ]; then echo "Cannot find MPS control daemon process"; exit 1; fi
    if [ -e "$pid" ] && kill -0 "$(cat "$pid")" 2>/dev/null; then
        echo "An instance of this daemon is already running"; exit 1
    fi
    rm -f "$D/control"; mkfifo "$D/control"
    "$0" serve </dev/null >/dev/null 2>&1 &
    echo $! > "$pid"
    say "start uid=$(id -u) device=$CUDA_VISIBLE_DEVICES";;
serve)
    while read -r line < "$D/control"; do
        case $line in quit*) say "$line"; [ -e "%(deaf)s" ] || { rm -f "$pid"; exit 0; };; esac
    done;;
*)
    read -r line
    echo "$line" > "$D/control";;
esac
"""


def install(folder: Path) -> Path:
    """Install the stand-in; returns the folder for PATH. Files `broken` and `deaf` there keep it from starting and
    quitting."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(PROGRAM % {"broken": folder / "broken", "deaf": folder / "deaf"})
    program.chmod(0o755)
    return folder


def log_of(folder: str | os.PathLike[str], uuid: str, uid: int | None = None) -> list[str]:
    """What control daemons of a card recorded. Args: folder: that of all of them."""
    path = Path(folder) / str(os.getuid() if uid is None else uid) / uuid / "log" / "control.log"
    return path.read_text().splitlines() if path.exists() else []
