"""Makes MIG layouts: the only place that changes a card.

An order is idempotent: what is there is compared with what is wanted, so that one that was cut short by a kill is
simply carried out again. A card whose new layout cannot be made gets back the one from before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from ctypes import byref, c_uint
from typing import Any

from gpusched.gpu.gateway import IN_USE, RESET_REQUIRED, Gateway, error_text
from gpusched.gpu.mig import read_profiles
from gpusched.model.mig import MigLayout, MigOrder, MigProfile, layout_of, placements

_SHARED_ENGINES = 0
_DEFAULT_KINDS = 9


def why_not_permitted() -> str | None:
    """Why this process cannot change layouts, as a clause."""
    if os.geteuid() == 0:
        return None
    return "MIG is changed by root, and this daemon does not run as root; see: gpusched system install"


class LayoutFailure(Exception):
    """A layout could not be made; the text is a clause."""


class Abandoned(Exception):
    """The daemon that gave the order is gone: the next one repeats it."""


def make_layouts(source: object, orders: Sequence[MigOrder], is_wanted: Callable[[], bool]) -> None:
    """Have layouts made by a source that can; others report no card that could be divided. Raises: Abandoned."""
    act = getattr(source, "carry_out", None)
    if act is not None and orders:
        act(orders, is_wanted)


def carry_out(nvml: Gateway, order: MigOrder, is_wanted: Callable[[], bool]) -> str | None:
    """Give a card its layout. Returns None, or why it was given up: a sentence.

    Args: nvml: initialised; is_wanted: whether to continue, asked before every step. Raises: Abandoned.
    """
    try:
        card = _Card(nvml, order.uuid, is_wanted)
    except LayoutFailure as failure:
        return f"{failure}"
    try:
        card.make(order.layout)
    except LayoutFailure as failure:
        try:
            card.make(order.before)
        except LayoutFailure as second:
            return f"{failure}; and the layout from before, {order.before}, could not be restored: {second}"
        return f"{failure}; the layout from before, {order.before}, is back"
    return None


class _Card:
    def __init__(self, nvml: Gateway, uuid: str, is_wanted: Callable[[], bool]) -> None:
        self._nvml = nvml
        self._uuid = uuid
        self._is_wanted = is_wanted
        self._handle: Any = None
        self._find()

    def make(self, layout: MigLayout) -> None:
        """Make a layout, whatever is there. Raises: LayoutFailure, Abandoned."""
        if self._is_made(layout):
            return
        if self._is_on():
            self._clear()
        if layout.is_on is not self._is_on():
            self._switch(layout.is_on)
        if layout.profiles:
            profiles = self._profiles()
            places = placements(layout, profiles)
            if places is None:
                names = ", ".join(one.name for one in profiles) or "none"
                raise LayoutFailure(f"{layout} does not fit on the card, whose profiles are {names}")
            for profile, start in places:
                self._create(profile, start)
        if not self._is_made(layout):
            raise LayoutFailure(f"the driver reports another layout than {layout}")

    # --- what is there ---------------------------------------------------------------------------

    def _find(self) -> None:
        self._handle = self._do("nvmlDeviceGetHandleByUUID", self._uuid, what="the card was not found")

    def _is_on(self) -> bool:
        return bool(self._do("nvmlDeviceGetMigMode", self._handle, what="its MIG mode cannot be read")[0])

    def _profiles(self) -> tuple[MigProfile, ...]:
        return read_profiles(self._nvml, self._nvml.ask, self._handle)

    def _is_made(self, layout: MigLayout) -> bool:
        if not self._is_on() or not layout.is_on:
            return self._is_on() is layout.is_on
        names = []
        for profile, instance in self._instances():
            if not self._has_whole_part(profile, instance):
                # Made by a process that was killed before it could finish.
                return False
            names.append(profile.name)
        return layout_of(names) == layout

    def _instances(self) -> Iterator[tuple[MigProfile, Any]]:
        kind = self._nvml.type_of("c_nvmlGpuInstance_t")
        for profile in self._profiles():
            found, count = (kind * profile.most)(), c_uint(profile.most)
            what = f"the instances of {profile.name} cannot be listed"
            self._do("nvmlDeviceGetGpuInstances", self._handle, profile.id, found, byref(count), what=what)
            for instance in list(found)[: count.value]:
                yield profile, instance

    def _parts(self, instance: Any) -> Iterator[tuple[int, Any]]:
        """Compute instances of a GPU instance, with their slices."""
        kind = self._nvml.type_of("c_nvmlComputeInstance_t")
        for slices, number, most in self._part_kinds(instance):
            found, count = (kind * most)(), c_uint(most)
            _, code = self._nvml.ask("nvmlGpuInstanceGetComputeInstances", instance, number, found, byref(count))
            if code:
                raise LayoutFailure(f"its compute instances cannot be listed: {error_text(code)}")
            yield from ((slices, part) for part in list(found)[: count.value])

    def _part_kinds(self, instance: Any) -> Iterator[tuple[int, int, int]]:
        """Slices, number and most of each kind of compute instance."""
        kinds = self._nvml.constant("NVML_COMPUTE_INSTANCE_PROFILE_COUNT") or _DEFAULT_KINDS
        name = "nvmlGpuInstanceGetComputeInstanceProfileInfo"
        for number in range(kinds):
            info, code = self._nvml.ask(name, instance, number, _SHARED_ENGINES)
            if code:
                info, code = self._nvml.ask(name, instance, number, _SHARED_ENGINES, version=1)
            if code == 0:
                yield int(info.sliceCount), int(info.id), int(info.instanceCount)

    def _has_whole_part(self, profile: MigProfile, instance: Any) -> bool:
        return any(slices == profile.slices for slices, _ in self._parts(instance))

    # --- steps -----------------------------------------------------------------------------------

    def _clear(self) -> None:
        for profile, instance in list(self._instances()):
            what = f"{profile.name} could not be removed"
            for _, part in list(self._parts(instance)):
                self._step("nvmlComputeInstanceDestroy", part, what=what)
            self._step("nvmlGpuInstanceDestroy", instance, what=what)

    def _create(self, profile: MigProfile, start: int) -> None:
        what = f"{profile.name} could not be made"
        place = self._nvml.type_of("c_nvmlGpuInstancePlacement_t")
        if start < 0 or place is None:
            instance = self._step("nvmlDeviceCreateGpuInstance", self._handle, profile.id, what=what)
        else:
            spot = place(start, profile.size)
            name = "nvmlDeviceCreateGpuInstanceWithPlacement"
            instance = self._step(name, self._handle, profile.id, byref(spot), what=what)
        code = 0
        for slices, number, _ in self._part_kinds(instance):
            if slices == profile.slices:
                _, code = self._nvml.ask("nvmlGpuInstanceCreateComputeInstance", instance, number)
                if code == 0:
                    return
        raise LayoutFailure(f"{what}: {error_text(code) if code else 'it has no compute instance of its size'}")

    def _switch(self, is_on: bool) -> None:
        what = f"MIG could not be switched {'on' if is_on else 'off'}"
        if not self._is_wanted():
            raise Abandoned
        # Drivers tell in either way what keeps them from it.
        status, code = self._nvml.ask("nvmlDeviceSetMigMode", self._handle, int(is_on))
        status = code or int(status)
        self._find()
        if self._is_on() is is_on:
            return
        # A pending change would take effect at some later reset, unexpectedly.
        self._nvml.ask("nvmlDeviceSetMigMode", self._handle, int(not is_on))
        why = error_text(status)
        if status == IN_USE:
            why = (
                "the card is reset for that, and a program has it open, perhaps a monitor such as DCGM; stop it, then "
                "repeat the command"
            )
        elif status in (0, RESET_REQUIRED):
            mode = int(is_on)
            why = f"the card needs a reset for that; with no program on it: nvidia-smi -i {self._uuid} -mig {mode}, "
            why += f"nvidia-smi -r -i {self._uuid} or a reboot, then repeat the command"
        raise LayoutFailure(f"{what}: {why}")

    def _step(self, name: str, *arguments: Any, what: str) -> Any:
        """Change something. Raises: LayoutFailure; Abandoned."""
        if not self._is_wanted():
            raise Abandoned
        return self._do(name, *arguments, what=what)

    def _do(self, name: str, *arguments: Any, what: str) -> Any:
        value, code = self._nvml.ask(name, *arguments)
        if code:
            raise LayoutFailure(f"{what}: {error_text(code)}")
        return value
