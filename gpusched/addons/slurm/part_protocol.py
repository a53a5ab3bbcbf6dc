"""Protocol between srun and the parts of its step on other nodes, over the standard streams of each part.

Frames as of `engine.attach_protocol`: one byte for the kind, four for the length, the content.

    srun to part    L LAUNCH   JSON, see `part_server.PartServer`, in as many frames as it takes; the last one is empty
                    G GO       start the tasks
                    I INPUT    for each task that reads srun's input        E EOF    end of it
                    S SIGNAL   "NUMBER", to every task                      w SIZE   "ROWS COLUMNS" of srun's terminal
    part to srun    R READY    every task waits for GO
                    F FAILED   a sentence: nothing will start
                    O OUTPUT   task (four bytes), stream (one byte: 1 or 2), what it wrote
                    T TAKEN    "COUNT": bytes of input that every task has taken since the last one
                    C CLOSED   no task takes input any more
                    N NOTE     a line for srun's error output
                    X ENDED    JSON [[task, exit code or, negative, signal], ...]
                    U USAGE    JSON [user CPU s, system CPU s, [peak KiB of each task]]: all is over

srun sends at most INPUT_WINDOW bytes of input that have not been taken, so that the part can always read on: a task
that does not read must not keep a signal from its neighbours.
"""

from __future__ import annotations

from gpusched.engine.attach_protocol import frame

LAUNCH, GO, INPUT, EOF, SIGNAL, SIZE = b"LGIESw"
READY, FAILED, OUTPUT, TAKEN, CLOSED, NOTE, ENDED, USAGE = b"RFOTCNXU"
INPUT_WINDOW = 1 << 18
CHUNK = 1 << 16
"""Maximum bytes of a stream in one frame."""
LAUNCH_PIECE = 1 << 19
LARGEST_LAUNCH = 1 << 26


def launch_frames(content: bytes) -> bytes:
    """LAUNCH, in as many frames as it takes."""
    pieces = [content[at : at + LAUNCH_PIECE] for at in range(0, len(content), LAUNCH_PIECE)]
    return b"".join(frame(LAUNCH, piece) for piece in (*pieces, b""))


def output_frame(task: int, stream: int, data: bytes) -> bytes:
    return frame(OUTPUT, task.to_bytes(4, "little") + bytes((stream,)) + data)


def read_output(content: bytes) -> tuple[int, int, bytes]:
    """Task, stream and data. Raises: IndexError."""
    return int.from_bytes(content[:4], "little"), content[4], content[5:]
