"""One pollable descriptor for everything an engine waits for, and its connection to the daemon's event loop."""

from __future__ import annotations

import asyncio
import select
import time
from collections.abc import Callable

NEVER = float("inf")


class Poller:
    """Watched descriptors and one alarm; calls the daemon when any of them has news."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wake: Callable[[], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._listening = False
        self.alarm_at = NEVER
        """Monotonic instant of the next look by the clock."""

    def watch(self, fd: int, also_writable: bool = False, again: bool = False) -> None:
        """Wait for a descriptor to become readable; `again` changes one already watched."""
        mask = select.EPOLLIN | select.EPOLLOUT if also_writable else select.EPOLLIN
        if again:
            self._epoll.modify(fd, mask)
        else:
            self._epoll.register(fd, mask)

    def unwatch(self, fd: int) -> None:
        """Must be called before the descriptor is closed."""
        self._epoll.unregister(fd)

    def ready(self, timeout_s: float = 0.0) -> list[int]:
        return [fd for fd, _ in self._epoll.poll(timeout_s)]

    def alarm_within(self, seconds: float) -> None:
        self.alarm_at = min(self.alarm_at, time.monotonic() + seconds)

    def take_alarm(self) -> bool:
        """Return whether the alarm is due, and clear it if so."""
        if time.monotonic() < self.alarm_at:
            return False
        self.alarm_at = NEVER
        return True

    def attach(self, wake: Callable[[], None] | None) -> None:
        """From now on, call `wake` on the thread of the running event loop; None stops that."""
        self._quiet()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake = wake
        self._loop = None if wake is None else asyncio.get_running_loop()
        self.rearm()

    def fire(self) -> None:
        """Wake the daemon now, for events that no descriptor announces."""
        if self._wake is not None:
            self._wake()

    def rearm(self) -> None:
        """Listen again: the daemon is not called a second time until then."""
        if self._loop is None:
            return
        if not self._listening:
            self._loop.add_reader(self._epoll.fileno(), self._on_readable)
            self._listening = True
        if self.alarm_at < NEVER and (self._timer is None or self._timer.when() > self.alarm_at):
            if self._timer is not None:
                self._timer.cancel()
            # The loop's clock is the monotonic one, but it need not have the same zero.
            delay_s = max(0.0, self.alarm_at - time.monotonic())
            self._timer = self._loop.call_later(delay_s, self._on_timer)

    def close(self) -> None:
        if not self._epoll.closed:
            self.attach(None)
            self._epoll.close()

    def _on_readable(self) -> None:
        self._quiet()
        self.fire()

    def _on_timer(self) -> None:
        self._timer = None
        self.fire()

    def _quiet(self) -> None:
        if self._loop is not None and self._listening:
            self._loop.remove_reader(self._epoll.fileno())
            self._listening = False
