"""What the tests of the executor have jobs call. Light: every job imports it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def square(number: int) -> int:
    return number * number


def add(one: int, other: int = 0) -> int:
    return one + other


def fail(text: str = "no") -> None:
    raise ValueError(text)


def leave() -> None:
    raise SystemExit(3)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(path: str) -> str:
    """Return when the file is there."""
    while not Path(path).exists():
        time.sleep(0.01)
    return path


def begin_and_wait_for(path: str) -> str:
    """The same, and tell by another file that it has begun."""
    Path(path + ".begun").touch()
    return wait_for(path)


def fail_until(path: str, times: int) -> int:
    """Fail so many times, counted in a file."""
    with open(path, "a+") as file:
        file.write("x")
        file.seek(0)
        tried = len(file.read())
    if tried <= times:
        raise OSError(f"attempt {tried}")
    return tried


def fail_then_die(path: str) -> None:
    """Raise in the first run, be killed in the second."""
    try:
        fail_until(path, 1)
    except OSError:
        raise
    die()


class Unpicklable(Exception):
    def __init__(self, one: int, other: int) -> None:
        super().__init__("cannot be made again")


def raise_unpicklable() -> None:
    raise Unpicklable(1, 2)


def return_unpicklable() -> object:
    return lambda: None


def environment(name: str) -> str | None:
    return os.environ.get(name)


SETTING: list[int] = []


def set_up(value: int, other: int = 0) -> None:
    SETTING.append(value + other)


def setting() -> list[int]:
    return SETTING


def multiplied(number: int) -> int:
    return number * SETTING[0]


def fail_set_up(path: str) -> None:
    """Raise once the file is there."""
    if Path(path).exists():
        raise OSError("no licence")
