"""GPUs that exist only in a text, so that everything can be tried and tested without hardware.

The text is a sum of groups, `COUNTxNAME:SIZE/LINKED[mig=INSTANCES]`; all but the size may be left out:

    4x24GiB      2xA100:80GiB+2xT4:16GiB      a100:80G      8x80GiB/4      4x24GiB/1
    1xA100:80GiB[mig=3x2g.20gb]      2xA100:80GiB[mig=1x3g.40gb+2x1g.10gb]+1xA100:80GiB

The cards of a group are linked with each other, as with NVLink: all of them, or always so many (`/4`), or
none (`/1`). With `[mig=...]` each of them is divided into these MIG instances; `[mig=]` has MIG on and none. Or
it is the path of a JSON file (it holds another `/`, or ends in `.json`), which is read again when it changes:

    {"gpus": [
        {"name": "A100", "vram": "80GiB", "utilisation": 0.4, "temperature_c": 61, "power_w": 250,
         "processes": [{"pid": 4711, "vram": "3GiB", "user": "eva", "name": "python"}]},
        {"name": "T4", "vram": "16GiB", "lost": true}]}

Keys of a GPU, all but `vram` optional: `name`, `vram`, `uuid`, `vram_used` (default: what the processes
hold; null: unknown), `utilisation` and `memory_utilisation` (0 to 1; null: unknown), `temperature_c`, `power_w`,
`processes` (null: no list), `lost`, `error` (a sentence: the device cannot be read), `mig_enabled`, `compute_mode`,
`display_active`, `unified_memory`, `link_group` (cards with the same number are linked), `numa` (number of the
NUMA node), `xids` (a list of faults so far; those that are new in the file are reported once: numbers as the driver
reports them, or `{"xid": 79, "at": 1700000000}` for a line of the kernel's log, which every new reader finds),
`mig` (a list of MIG instances, also an empty one, has MIG on; each with `profile`, and if it is to be other than the
profile says `vram`, `uuid`, `vram_used` and `processes` as of a GPU), `openers` (processes that
have it open and are not in the list), `ecc_errors`, `slowdown_c`, `energy_mj` (a counter of millijoules),
`power_limit_w` and `power_min_w` (the lowest limit that can be set; without it, none can; numbers), `capability` (the
CUDA compute capability, else 8.0; null: none), `remap_pending`, `remap_failed` and `mig_pending` (all unknown at
first).
Cards named like one that can do MIG (A100, H100, H200, B200) can be divided by command, unless a file describes them.
Keys of a process: `pid`, `vram` (null: unknown), `user`, `name`, `started_at`, `sm` (0 to 1). A process is a job's when
its pid is, else foreign. In place of `pid` may be `job`, the number of a job: a process of that job, whichever GPU it
booked, for as long as there is one. Sizes are texts such as `24GiB`, or numbers of MiB.

Beside `gpus`: `driver_version`; `init_error` (an NVML code: 18 is a driver mismatch; 9, 12 and 28 mean
that there are no GPUs); `read_delay_s` (each reading takes this long); `hang` (readings never end); `log_trouble`
(a sentence: why the kernel's log cannot be read).
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpusched.errors import Refused, UsageError
from gpusched.gpu import gateway, procinfo
from gpusched.gpu.mig import instance_of
from gpusched.model.cluster import GpuProcess, GpuReading, GpuSample, PowerLimit, Xid
from gpusched.model.mig import LayoutError, MigLayout, MigOrder, MigProfile, MigState, check_layout, layout_of
from gpusched.model.units import parse_size_mib
from gpusched.model.value import replace
from gpusched.paths import MAX_TEXT, read_at_most

MAX_GPUS = 1024

_EXAMPLE = "for example: GPUSCHED_FAKE_GPUS=4x24GiB, or 2xA100:80GiB+2xT4:16GiB, or the path of a JSON file"
_GROUP = re.compile(r"(?:(?P<count>\d+)x)?(?:(?P<name>[^:+]+):)?(?P<size>[^:+/]+)(?:/(?P<linked>\d+))?", re.IGNORECASE)
_MIG = re.compile(r"\[mig=(?P<mig>[^\]]*)\]$", re.IGNORECASE)
_ANY_MIG = re.compile(r"\[mig=[^\]]*\]", re.IGNORECASE)
_PLUS = re.compile(r"\+(?![^\[]*\])")
"""Between groups, not between instances of one group."""
_INSTANCES = re.compile(r"(?:(?P<count>\d)x)?(?P<profile>(?:\d+c\.)?\d+g\.(?P<gib>\d+)gb[\w.+]*)", re.IGNORECASE)
_MOST_INSTANCES = 7
_GROUPS_ONLY = re.compile(r"[^/]*\d[KMGT]?(I?B)?/\d+(\+[^/]*\d[KMGT]?(I?B)?(/\d+)?)*", re.IGNORECASE)
"""A sum of groups that contains a `/`; any other text with one is a path."""
_IDLE_TEMPERATURE_C = 35.0
_IDLE_POWER_W = 30.0
_CAPABILITY = 8.0


class SimulatedSource:
    """Reads simulated GPUs; see the module's docstring for their description.

    Args: socket: of the daemon whose jobs the file refers to; None: of any.
    Raises: UsageError when the initial description is invalid. One that breaks later makes an
    error in the reading.
    """

    def __init__(
        self,
        text: str,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        socket: str | None = None,
    ) -> None:
        self._text = text
        self._socket = socket
        self._clock = clock
        self._sleep = sleep
        self._path = text if is_path(text) else None
        self._stamp: tuple[int, int, int] | None = None
        self._machine: _Machine = _Machine()
        self._broken: str | None = None
        self._limits_w: dict[str, float] = {}
        """Power limits that were set, by UUID."""
        self._told: dict[str, int] = {}
        """How many faults of each GPU have been reported."""
        self._made = 0
        """Layouts made so far: instances that are made again have other UUIDs."""
        if self._path is None:
            self._machine = _Machine(gpus=_parse_groups(text))
        else:
            self._stamp = _stamp(self._path)
            self._machine = _load(self._path, socket)

    def read(self) -> GpuReading:
        self._refresh()
        machine = self._machine
        at = self._clock()
        while machine.hang:
            self._sleep(3600.0)
        if machine.read_delay_s:
            self._sleep(machine.read_delay_s)
        if machine.init_error in gateway.NO_GPU_CODES:
            return GpuReading(at, "none", notes=(gateway.error_text(int(machine.init_error or 0)),))
        if machine.init_error is not None:
            return GpuReading(at, "simulated", error=gateway.error_text(machine.init_error))
        note = f"the GPUs are simulated: {self._text}"
        gpus = tuple(
            replace(gpu, power_limit_w=self._limits_w[gpu.uuid]) if gpu.uuid in self._limits_w else gpu
            for gpu in self._with_new_faults(machine.gpus, at)
        )
        return GpuReading(
            at, "simulated", gpus, self._broken, machine.driver_version, (note,), log_trouble=machine.log_trouble
        )

    def carry_out(self, orders: Sequence[MigOrder], is_wanted: Callable[[], bool]) -> None:
        """Make layouts, each order once; those of a restarted source are as described."""
        for order in orders:
            card = next((gpu for gpu in self._machine.gpus if gpu.uuid == order.uuid), None)
            if card is None or card.mig is None or card.mig.order == order.number:
                continue
            try:
                check_layout(order.layout, card.mig.profiles, str(card.index))
                failure = card.mig.why_not
            except LayoutError as error:
                failure = str(error)
            state = replace(card.mig, order=order.number, failure=failure)
            found = [replace(gpu, mig=state) if gpu is card else gpu for gpu in self._machine.gpus]
            if failure is None and order.layout != _layout_of(card, self._machine.gpus):
                self._made += 1
                rest = [gpu for gpu in found if gpu.uuid != card.uuid and gpu.mig_parent != card.uuid]
                found = [*rest, *_with_layout(replace(card, mig=state), order.layout, self._made)]
                found.sort(key=lambda gpu: (gpu.mig_parent is not None, gpu.index))
            self._machine.gpus = tuple(found)

    def _with_new_faults(self, gpus: tuple[GpuSample, ...], at: float) -> tuple[GpuSample, ...]:
        """Report each fault in one reading only, as the driver does."""
        told, self._told = self._told, {gpu.uuid: len(gpu.xids) for gpu in gpus}
        return tuple(
            replace(gpu, xids=_since(gpu.xids, told.get(gpu.uuid, 0), at)) if gpu.xids else gpu for gpu in gpus
        )

    def power_limit(self, uuid: str) -> PowerLimit | str:
        """As `PowerLimits`."""
        low_w = self._machine.power_low_w.get(uuid)
        limit_w = next((gpu.power_limit_w for gpu in self._machine.gpus if gpu.uuid == uuid), None)
        if low_w is None or limit_w is None:
            return "it has no power limit that can be set"
        return PowerLimit(self._limits_w.get(uuid, limit_w), low_w)

    def set_power_limit(self, uuid: str, limit_w: float) -> str | None:
        """As `PowerLimits`."""
        found = self.power_limit(uuid)
        if isinstance(found, str):
            return found
        self._limits_w[uuid] = limit_w
        return None

    def close(self) -> None:
        """Nothing is held."""

    def _refresh(self) -> None:
        if self._path is None:
            return
        try:
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                if self._machine.names_jobs:
                    self._machine = _load(self._path, self._socket)
                return
            self._machine = _load(self._path, self._socket)
            self._stamp, self._broken = stamp, None
        except UsageError as error:
            # Half-written files come here too: the stamp stays old, so the next reading tries again.
            self._broken = error.message


class _Machine:
    def __init__(
        self,
        gpus: tuple[GpuSample, ...] = (),
        driver_version: str | None = None,
        init_error: int | None = None,
        read_delay_s: float = 0.0,
        hang: bool = False,
        log_trouble: str | None = None,
        names_jobs: bool = False,
        power_low_w: Mapping[str, float] | None = None,
    ) -> None:
        self.gpus = gpus
        self.driver_version = driver_version
        self.init_error = init_error
        self.read_delay_s = read_delay_s
        self.hang = hang
        self.log_trouble = log_trouble
        self.power_low_w = power_low_w or {}
        """Lowest power limit of the GPUs whose limit can be set, by UUID."""
        self.names_jobs = names_jobs
        """Processes come and go with jobs, so that it is to be read again each time."""


def _since(xids: tuple[Xid, ...], told: int, at: float) -> tuple[Xid, ...]:
    """Faults after the first `told`; events are dated when they are reported."""
    return tuple(xid if xid.sequence is not None else replace(xid, at=at) for xid in xids[told:])


def simulated_uuid(number: int) -> str:
    """UUID of the simulated GPU with this number; stable across restarts."""
    return f"GPU-SIM-00000000-0000-0000-0000-{number:012d}"


def simulated_mig_uuid(number: int, slot: int) -> str:
    """UUID of an instance of the simulated GPU with this number."""
    return f"MIG-SIM-00000000-0000-0000-{number:04d}-{slot:012d}"


def is_path(text: str) -> bool:
    """Whether a description of GPUs is the path of a JSON file."""
    return text.endswith(".json") or ("/" in text and _GROUPS_ONLY.fullmatch(_ANY_MIG.sub("", text)) is None)


# --- groups -------------------------------------------------------------------------------------


def _parse_groups(text: str) -> tuple[GpuSample, ...]:
    kinds: list[tuple[str, int, int | None]] = []
    divided: dict[int, tuple[str, ...]] = {}
    """Profiles of the instances of each card that has MIG on."""
    for group in _PLUS.split(text):
        mig = _MIG.search(group.strip())
        match = _GROUP.fullmatch(group.strip() if mig is None else group.strip()[: mig.start()])
        if match is None:
            raise _bad(text, f"{group.strip()!r} is not COUNTxNAME:SIZE")
        try:
            vram_mib = parse_size_mib(match["size"])
        except ValueError as error:
            raise _bad(text, str(error)) from None
        count = int(match["count"] or 1) if len(match["count"] or "") <= 6 else MAX_GPUS + 1
        if not 1 <= count <= MAX_GPUS - len(kinds):
            raise _bad(text, f"the number of GPUs must be from 1 to {MAX_GPUS}")
        name, linked = (match["name"] or "Simulated GPU").strip(), _linked(text, match["linked"], count)
        first = len(kinds)
        groups = (None if linked == 1 else first + at // linked * linked for at in range(count))
        kinds.extend((name, vram_mib, group) for group in groups)
        if mig is not None:
            divided.update(dict.fromkeys(range(first, first + count), _profiles(text, mig["mig"])))
    cards = tuple(
        GpuSample(
            uuid=simulated_uuid(number),
            index=number,
            name=name,
            vram_total_mib=vram_mib,
            vram_used_mib=0,
            utilisation=0.0,
            memory_utilisation=0.0,
            temperature_c=_IDLE_TEMPERATURE_C,
            power_w=_IDLE_POWER_W,
            processes=(),
            pci_bus_id=_bus_id(number),
            minor=number,
            link_group=group,
            mig=_mig_state(name, vram_mib),
            cuda_capability=_CAPABILITY,
        )
        for number, (name, vram_mib, group) in enumerate(kinds)
    )
    found = [_divided(card, divided[card.index]) if card.index in divided else (card,) for card in cards]
    return (*(card for card, *_ in found), *(one for _, *instances in found for one in instances))


_MIG_CARDS = re.compile(r"[ABH][12]00", re.IGNORECASE)
_KINDS: tuple[tuple[int, int, tuple[int, ...], int], ...] = (
    *((1, 1, (0, 1, 2, 3, 4, 5, 6), 7), (1, 2, (0, 2, 4, 6), 4), (2, 2, (0, 2, 4), 3)),
    *((3, 4, (0, 4), 2), (4, 4, (0,), 1), (7, 8, (0,), 1)),
)
"""Compute slices, memory slices, where it may begin, most; see NVIDIA's MIG guide, A100 and H100."""


def _mig_state(name: str, vram_mib: int) -> MigState | None:
    if _MIG_CARDS.search(name) is None:
        return None
    slice_mib = vram_mib // 8
    return MigState(
        tuple(
            MigProfile(
                f"{slices}g.{round(slice_mib * size / 1024)}gb", number, slices, slice_mib * size, size, starts, most
            )
            for number, (slices, size, starts, most) in enumerate(_KINDS)
        )
    )


def _layout_of(card: GpuSample, gpus: Sequence[GpuSample]) -> MigLayout:
    if not card.mig_enabled:
        return MigLayout(False)
    return layout_of(gpu.mig_profile or "" for gpu in gpus if gpu.mig_parent == card.uuid)


def _with_layout(card: GpuSample, layout: MigLayout, made: int) -> tuple[GpuSample, ...]:
    if not layout.is_on:
        return (replace(card, mig_enabled=False, mig_instances=0, utilisation=0.0, memory_utilisation=0.0),)
    first, *instances = _divided(card, layout.profiles)
    return first, *(replace(one, uuid=f"{one.uuid}-{made}") for one in instances)


def _profiles(text: str, parts: str) -> tuple[str, ...]:
    """Expand `3x2g.20gb` into one profile per instance."""
    found: list[str] = []
    for part in filter(None, (part.strip() for part in parts.split("+"))):
        match = _INSTANCES.fullmatch(part)
        if match is None:
            raise _bad(text, f"{part!r} is not COUNTxPROFILE of a MIG instance, such as 3x2g.20gb")
        found.extend([match["profile"]] * int(match["count"] or 1))
    if len(found) > _MOST_INSTANCES:
        raise _bad(text, f"a card has at most {_MOST_INSTANCES} MIG instances")
    return tuple(found)


def _divided(card: GpuSample, profiles: tuple[str, ...]) -> tuple[GpuSample, ...]:
    """Turn MIG on for a card: the card and its empty instances."""
    card = replace(card, mig_enabled=True, mig_instances=len(profiles), utilisation=None, memory_utilisation=None)
    made = []
    for slot, profile in enumerate(profiles):
        total_mib, uuid = profile_mib(profile), simulated_mig_uuid(card.index, slot)
        made.append(
            instance_of(
                card,
                slot=slot,
                uuid=uuid,
                profile=profile,
                total_mib=total_mib,
                used_mib=0,
                processes=(),
                gi=slot,
                ci=0,
            )
        )
    return card, *made


def profile_mib(profile: str) -> int:
    """Memory of a MIG instance according to its profile. Raises: ValueError for an invalid one."""
    match = _INSTANCES.fullmatch(profile)
    if match is None or match["count"] is not None:
        raise ValueError(f"{profile!r} is not a profile of a MIG instance, such as 2g.20gb")
    return int(match["gib"]) * 1024


def _linked(text: str, word: str | None, count: int) -> int:
    """How many cards of a group are linked with each other; 1 for none."""
    if word is None:
        return count
    linked = int(word) if len(word) <= 6 else MAX_GPUS + 1
    if not 1 <= linked <= count or count % linked:
        raise _bad(text, f"{count} GPUs cannot be linked by {word}")
    return linked


def _bad(text: str, why: str) -> UsageError:
    return UsageError(f"the simulated GPUs {text!r} cannot be read: {why}", _EXAMPLE)


def _bus_id(number: int) -> str:
    return f"00000000:{number & 0xFF:02X}:{number >> 8:02X}.0"


# --- the JSON file ------------------------------------------------------------------------------


def _stamp(path: str) -> tuple[int, int, int]:
    try:
        status = os.stat(path)
    except OSError as error:
        raise UsageError(f"the simulated GPUs' file {path!r} cannot be read: {error.strerror}", _EXAMPLE) from None
    return status.st_mtime_ns, status.st_size, status.st_ino


class _Jobs:
    """Processes of jobs named in a file, searched for once and only if it names any."""

    def __init__(self, socket: str | None) -> None:
        self._socket = socket
        self._pids: Mapping[int, int] | None = None

    @property
    def were_asked_for(self) -> bool:
        return self._pids is not None

    def pid_of(self, job_id: int) -> int | None:
        """A process of the job; None when it has none."""
        if self._pids is None:
            self._pids = procinfo.processes_of_jobs(self._socket)
        return self._pids.get(job_id)


def _load(path: str, socket: str | None = None) -> _Machine:
    try:
        with open(path, "rb") as file:
            content = read_at_most(file, MAX_TEXT, f"the simulated GPUs' file {path!r}", _EXAMPLE)
        document = json.loads(content)
    except Refused as error:
        raise UsageError(error.message, error.hint) from None
    except OSError as error:
        raise UsageError(f"the simulated GPUs' file {path!r} cannot be read: {error.strerror}", _EXAMPLE) from None
    except ValueError as error:
        raise UsageError(f"the simulated GPUs' file {path!r} is not JSON: {error}", _EXAMPLE) from None
    try:
        return _machine(_Reader(document, "the file", _Jobs(socket)))
    except ValueError as error:
        raise UsageError(f"the simulated GPUs' file {path!r} is wrong: {error}", _EXAMPLE) from None


def _machine(top: _Reader) -> _Machine:
    entries = top.list_of("gpus")
    if len(entries) > MAX_GPUS:
        raise ValueError(f"it has {len(entries)} GPUs, at most {MAX_GPUS} are simulated")
    readers = [top.inner(entry, f"GPU {number}") for number, entry in enumerate(entries)]
    lows_w = [reader.number("power_min_w") for reader in readers]
    read = [_gpu_and_instances(reader, number) for number, reader in enumerate(readers)]
    gpus = (*(card for card, *_ in read), *(one for _, *instances in read for one in instances))
    uuids = [gpu.uuid for gpu in gpus]
    for uuid in uuids:
        if uuids.count(uuid) > 1:
            raise ValueError(f"the UUID {uuid!r} is there twice")
    code = top.number("init_error")
    machine = _Machine(
        gpus=gpus,
        driver_version=top.text("driver_version"),
        init_error=None if code is None else int(code),
        read_delay_s=top.number("read_delay_s") or 0.0,
        hang=top.flag("hang"),
        log_trouble=top.text("log_trouble"),
        names_jobs=top.jobs.were_asked_for,
        power_low_w={card.uuid: low_w for (card, *_), low_w in zip(read, lows_w, strict=True) if low_w is not None},
    )
    top.end()
    return machine


def _gpu_and_instances(entry: _Reader, number: int) -> tuple[GpuSample, ...]:
    listed = entry.list_of("mig") if entry.has("mig") else None
    card = _gpu(entry, number)
    if listed is None or card.is_lost or card.error:
        return (card,)
    card = replace(card, mig_enabled=True, mig_instances=len(listed), utilisation=None, memory_utilisation=None)
    if len(listed) > _MOST_INSTANCES:
        raise ValueError(f"{entry.what} has {len(listed)} MIG instances, at most {_MOST_INSTANCES} can be")
    return card, *(
        _instance(entry.inner(one, f"{entry.what}, instance {slot}"), slot, card) for slot, one in enumerate(listed)
    )


def _instance(entry: _Reader, slot: int, card: GpuSample) -> GpuSample:
    profile = entry.text("profile")
    if profile is None:
        raise ValueError(f"{entry.what} has no profile")
    processes = _processes(entry)
    sample = instance_of(
        card,
        slot=slot,
        uuid=entry.text("uuid") or simulated_mig_uuid(card.index, slot),
        profile=profile,
        total_mib=entry.size("vram", profile_mib(profile)),
        used_mib=entry.size("vram_used", sum(process.vram_mib or 0 for process in processes or ())),
        processes=processes,
        gi=slot,
        ci=0,
    )
    entry.end()
    return sample


def _processes(entry: _Reader) -> tuple[GpuProcess, ...] | None:
    if entry.is_null("processes"):
        return None
    listed = entry.list_of("processes")
    read = (_process(entry.inner(found, f"{entry.what}, process {at}")) for at, found in enumerate(listed))
    return tuple(process for process in read if process is not None)


def _gpu(entry: _Reader, number: int) -> GpuSample:
    name = entry.text("name") or "Simulated GPU"
    total_mib = entry.size("vram", None)
    processes = _processes(entry)
    held_mib = sum(process.vram_mib or 0 for process in processes or ())
    sample = GpuSample(
        uuid=entry.text("uuid") or simulated_uuid(number),
        index=number,
        name=name,
        vram_total_mib=total_mib,
        vram_used_mib=entry.size("vram_used", held_mib),
        utilisation=entry.number("utilisation", 0.0),
        memory_utilisation=entry.number("memory_utilisation", 0.0),
        temperature_c=entry.number("temperature_c", _IDLE_TEMPERATURE_C),
        power_w=entry.number("power_w", _IDLE_POWER_W),
        processes=processes,
        pci_bus_id=_bus_id(number),
        minor=number,
        mig_enabled=entry.flag("mig_enabled"),
        compute_mode=int(entry.number("compute_mode", 0) or 0),
        display_active=entry.flag("display_active"),
        unified_memory=entry.flag("unified_memory"),
        is_lost=entry.flag("lost"),
        error=entry.text("error"),
        link_group=entry.integer("link_group"),
        numa=entry.integer("numa"),
        xids=_xids(entry),
        ecc_errors=entry.integer("ecc_errors"),
        remap_pending=entry.flag_or_none("remap_pending"),
        remap_failed=entry.flag_or_none("remap_failed"),
        slowdown_c=entry.number("slowdown_c"),
        mig_pending=entry.flag_or_none("mig_pending"),
        energy_mj=entry.integer("energy_mj"),
        power_limit_w=entry.number("power_limit_w"),
        cuda_capability=entry.number("capability", _CAPABILITY),
        openers=tuple(
            process
            for found in entry.list_of("openers")
            if (process := _process(entry.inner(found, f"{entry.what}, opener"))) is not None
        ),
    )
    entry.end()
    if sample.is_lost or sample.error:
        # As with a real card in this state: its identity is remembered, nothing is measured.
        return GpuSample(
            uuid=sample.uuid,
            index=number,
            name=name,
            pci_bus_id=sample.pci_bus_id,
            minor=number,
            is_lost=sample.is_lost,
            error=sample.error or gateway.error_text(15),
            link_group=sample.link_group,
            numa=sample.numa,
            xids=sample.xids,
        )
    return sample


def _xids(entry: _Reader) -> tuple[Xid, ...]:
    found = []
    for place, value in enumerate(entry.list_of("xids")):
        if isinstance(value, Mapping):
            line = entry.inner(value, f"{entry.what}, fault {place}")
            number, at, sequence = line.integer("xid"), line.number("at", 0.0), place + 1
            line.end()
        else:
            number, at, sequence = value, 0.0, None
        if type(number) is not int or number < 1 or at is None:
            raise ValueError(f"'xids' of {entry.what} is not a list of numbers from 1")
        found.append(Xid(number, at, sequence))
    return tuple(found)


def _process(entry: _Reader) -> GpuProcess | None:
    """Parse a process; None for that of a job without one now."""
    pid, job_id = entry.integer("pid"), entry.integer("job")
    if (pid is None) is (job_id is None):
        raise ValueError(f"{entry.what} has {'no pid' if pid is None else 'both pid and job'}")
    process = GpuProcess(
        pid=pid or 0,
        vram_mib=entry.size("vram", None),
        user=entry.text("user"),
        started_at=entry.number("started_at"),
        name=entry.text("name"),
        sm=entry.number("sm"),
    )
    entry.end()
    if job_id is None:
        return process
    pid = entry.jobs.pid_of(job_id)
    if pid is None:
        return None
    seen = procinfo.describe(pid, process.vram_mib)
    return replace(seen, user=process.user or seen.user, name=process.name or seen.name, sm=process.sm)


class _Reader:
    """Takes known keys from one JSON object; `end` reports unknown ones."""

    def __init__(self, value: object, what: str, jobs: _Jobs) -> None:
        if not isinstance(value, Mapping):
            raise ValueError(f"{what} is not an object with keys")
        self._left: dict[str, Any] = dict(value)
        self.what = what
        self.jobs = jobs

    def inner(self, value: object, what: str) -> _Reader:
        return _Reader(value, what, self.jobs)

    def has(self, key: str) -> bool:
        return key in self._left

    def is_null(self, key: str) -> bool:
        if key in self._left and self._left[key] is None:
            del self._left[key]
            return True
        return False

    def list_of(self, key: str) -> list[Any]:
        value = self._left.pop(key, None)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._wrong(key, value, "a list")
        return value

    def text(self, key: str) -> str | None:
        value = self._left.pop(key, None)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, value, "a text")
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        """A number; the default for a missing key, None for null."""
        value = self._left.pop(key, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            raise self._wrong(key, value, "a number from 0")
        return value

    def integer(self, key: str) -> int | None:
        """An integer from 0; None for a missing or null key."""
        value = self.number(key)
        if value is not None and value != int(value):
            raise self._wrong(key, value, "a whole number")
        return None if value is None else int(value)

    def size(self, key: str, default: int | None) -> int | None:
        """MiB, from a text such as `24GiB` or a number of MiB."""
        value = self._left.pop(key, default)
        if isinstance(value, str):
            return parse_size_mib(value)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            raise self._wrong(key, value, "a size such as 24GiB")
        return int(value)

    def flag(self, key: str) -> bool:
        value = self._left.pop(key, False)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def flag_or_none(self, key: str) -> bool | None:
        return self.flag(key) if key in self._left and not self.is_null(key) else None

    def end(self) -> None:
        if self._left:
            raise ValueError(f"{self.what} has the unknown key {sorted(self._left)[0]!r}")

    def _wrong(self, key: str, value: object, wanted: str) -> ValueError:
        return ValueError(f"{key!r} of {self.what} is {value!r}, not {wanted}")
