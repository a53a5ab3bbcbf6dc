"""Which launcher a daemon uses: systemd where it can start units, else the fork server."""

from __future__ import annotations

import hashlib
import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from gpusched.engine.launcher import ForkServer, Launcher
from gpusched.engine.properties import Names
from gpusched.errors import NotReady

BOOTED = "/run/systemd/system"
"""There when PID 1 is systemd. Source: sd_booted(3)."""
OLDEST = 244
"""The first systemd with all properties that are used; 252 is what they were tried with."""
ANSWER_S = 10.0
"""How long the daemon waits at its start for PID 1 to say who it is."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A launcher, and how the administrator is told of it."""

    kind: str
    """`systemd` or `fork`."""
    text: str
    make: Callable[[str, str, int], Launcher]


def choose(wanted: str, *, is_system: bool, root: str = "") -> Choice:
    """The launcher for a daemon. Raises: NotReady when what is wanted is not to be had.

    Args: wanted: the setting `[daemon] launcher`; root: folder of a system's daemon that is only tried out.
    """
    if wanted == "fork":
        return Choice("fork", "fork server, as [daemon] launcher says", ForkServer)
    version = 0
    why = None if is_system else "this daemon is not the system's"
    if why is None:
        try:
            version = systemd_version()
        except OSError as error:
            why = str(error)
    if why is None and version < OLDEST:
        why = f"systemd {version} is older than {OLDEST}"
    if why is None:
        from gpusched.engine.units import UnitLauncher

        names = names_of(root)
        return Choice(
            "systemd", f"systemd {version}, units {names.unit('JOB.RUN')}", partial(UnitLauncher, names=names)
        )
    if wanted == "systemd":
        raise NotReady(
            f'[daemon] launcher is "systemd", but {why}', 'set it to "auto" or "fork"; see: gpusched config show'
        )
    return Choice("fork", f"fork server: {why}", ForkServer)


def names_of(root: str) -> Names:
    """How the units of a daemon are called: one that is tried out beside the machine's own has other names."""
    return Names(f"gpusched-{hashlib.sha256(os.fsencode(root)).hexdigest()[:8]}") if root else Names()


def systemd_version() -> int:
    """Of PID 1, which answers on the system's bus. Raises: OSError with a sentence."""
    if not os.path.isdir(BOOTED):
        raise OSError("PID 1 is not systemd")
    from jeepney import MessageType, Properties

    from gpusched.engine import bus as buses
    from gpusched.engine.units import MANAGER

    try:
        bus = buses.Bus(buses.SYSTEM_BUS)
    except OSError as error:
        raise OSError(f"nobody answers at {buses.SYSTEM_BUS}: {error.strerror}") from None
    try:
        serial = bus.call(Properties(MANAGER).get("Version"))
        until = time.monotonic() + ANSWER_S
        while not bus.lost and (left_s := until - time.monotonic()) > 0:
            waits = select.POLLIN if bus.flush() else select.POLLIN | select.POLLOUT
            poll = select.poll()
            poll.register(bus.fileno(), waits)
            poll.poll(left_s * 1000)
            for message in bus.receive():
                if bus.answers(message) == serial:
                    if message.header.message_type is MessageType.error:
                        raise OSError(f"systemd does not say its version: {message.body}")
                    return leading_number(message.body[0][1])
        raise OSError(f"systemd does not answer on the bus: {bus.lost or f'nothing came within {ANSWER_S:g} s'}")
    finally:
        bus.close()


def leading_number(text: str) -> int:
    """252 of `252.39-1~deb12u2`; 0 when it begins with none."""
    digits = text[: len(text) - len(text.lstrip("0123456789"))]
    return int(digits) if digits else 0
