"""Device rules: small eBPF programs on a control group that say which device nodes its processes may open.

systemd has such rules too (DevicePolicy, DeviceAllow), but resolves device numbers by name, again at each
daemon-reload: a job whose node is missing at that moment loses its GPU for good. These use numbers, and are the same
without systemd.

They restrict GPUs only: all other nodes are left to file permissions, in a job as in a login session.
Attaching a rule requires root, and processes under it cannot remove it.

Source: bpf(2), linux/bpf.h, kernel/bpf/cgroup.c.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

GPU_MAJOR = 195
"""Of /dev/nvidiaN, nvidiactl and nvidia-modeset, on every Linux."""
CONTROL_MINORS = (254, 255)
"""nvidia-modeset and nvidiactl, which belong to no particular card."""
DRI_MAJOR = 226
NVIDIA_VENDOR, AMD_VENDOR = "0x10de", "0x1002"
FIRST_RENDER_MINOR = 128
"""Of /dev/dri/renderDN; /dev/nvidiaN has smaller ones."""

_SYSCALL = {"x86_64": 321, "aarch64": 280, "ppc64le": 361}
_PROG_LOAD, _PROG_ATTACH, _PROG_DETACH, _GET_FD_BY_ID, _GET_INFO, _PROG_QUERY = 5, 8, 9, 13, 15, 16
_TYPE_DEVICE, _ATTACH_DEVICE = 15, 6
_ALLOW_MULTI = 2
_CHAR = 2
_GET_UID_GID = 15
"""Number of the helper bpf_get_current_uid_gid."""
_ATTR_BYTES = 144
_QUERIED = 64
_INFO_BYTES = 256
_NAME_AT = 64
"""Offset of `name` in struct bpf_prog_info."""

Only = tuple[int, tuple[int, ...], bool]
"""A major number, minors, and whether only these may be opened or all but these."""


# --- what is shut off ---------------------------------------------------------------------------------


def job_rule(minors: Iterable[int], caps: Iterable[int], majors: dict[str, int], drm: dict[int, bool]) -> list[Only]:
    """Rule for a job that may open these cards alone; a job without any must not open the driver's nodes at all.

    AMD's compute node, /dev/kfd, is one for all cards; the kernel lets a process use only those whose render node its
    control group may open. Source: linux, drivers/gpu/drm/amd/amdkfd/kfd_priv.h, kfd_devcgroup_check_permission.

    Args: minors: N of its /dev/nvidiaN, or of its /dev/dri/renderDN for AMD's. caps: minors of its /dev/nvidia-caps.
    majors: of the driver, by name (see `driver_majors`). drm: minors of the vendors' nodes in /dev/dri, and whether
    their card is the job's.
    """
    own = tuple(minors)
    rule: list[Only] = [(GPU_MAJOR, (*own, *CONTROL_MINORS) if own else (), True)]
    for name, major in sorted(majors.items()):
        if name == "nvidia-caps":
            rule.append((major, tuple(caps), True))
        elif (name == "nvidia-uvm" and not own) or (name == "kfd" and max(own, default=0) < FIRST_RENDER_MINOR):
            rule.append((major, (), True))
    shut = tuple(sorted(minor for minor, is_own in drm.items() if not is_own))
    if shut:
        rule.append((DRI_MAJOR, shut, False))
    return rule


def guard_rule(majors: dict[str, int]) -> list[Only]:
    """Rule for processes outside jobs: they may query the driver, but use no GPU."""
    rule: list[Only] = [(GPU_MAJOR, CONTROL_MINORS, True)]
    if "nvidia-caps" in majors:
        rule.append((majors["nvidia-caps"], (), True))
    return rule


def driver_majors(path: str = "/proc/devices") -> dict[str, int]:
    """Major numbers of the drivers' character devices, by name; all but 195 are assigned when a driver is loaded."""
    found: dict[str, int] = {}
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("Block"):
                    break
                words = line.split()
                if len(words) == 2 and words[1].startswith(("nvidia-", "kfd")) and words[0].isdigit():
                    found[words[1]] = int(words[0])
    except OSError:
        pass
    return found


def mig_caps(instances: Iterable[tuple[int, int, int]], proc: str = "/proc") -> list[int]:
    """Minors of the nodes in /dev/nvidia-caps that open MIG instances, two for each.

    Args: instances: N of the card's nvidiaN, GPU instance, compute instance. Source: NVIDIA's MIG guide, device nodes.
    """
    found: list[int] = []
    for minor, gi, ci in instances:
        folder = f"{proc}/driver/nvidia/capabilities/gpu{minor}/mig/gi{gi}"
        for path in (f"{folder}/access", f"{folder}/ci{ci}/access"):
            number = _number_in(path, "DeviceFileMinor")
            if number is not None:
                found.append(number)
    return found


def drm_nodes(own: Iterable[int], sys: str = "/sys", proc: str = "/proc", *, has_amd: bool = False) -> dict[int, bool]:
    """Minors of the vendors' nodes in /dev/dri, and whether the card is one of `own`, see `job_rule`.

    Args: has_amd: include AMD's; otherwise they may be a processor's graphics, which are never booked.
    """
    mine = set(own)
    found: dict[int, bool] = {}
    for name in names_in(f"{sys}/class/drm"):
        node = f"{sys}/class/drm/{name}"
        major, _, minor = text_in(f"{node}/dev").partition(":")
        if major != str(DRI_MAJOR) or not minor.isdigit():
            continue
        vendor = text_in(f"{node}/device/vendor")
        if vendor == AMD_VENDOR and has_amd:
            # The job's card has its other nodes, for modes and screens, in the same folder.
            renders = (one.removeprefix("renderD") for one in names_in(f"{node}/device/drm"))
            found[int(minor)] = any(one.isdigit() and int(one) in mine for one in renders)
        elif vendor == NVIDIA_VENDOR:
            bus_id = os.path.basename(os.path.realpath(f"{node}/device"))
            found[int(minor)] = _number_in(f"{proc}/driver/nvidia/gpus/{bus_id}/information", "Device Minor") in mine
    return found


def _number_in(path: str, name: str) -> int | None:
    """Number in a line `NAME: NUMBER`."""
    for line in text_in(path).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name and value.strip().isdigit():
            return int(value)
    return None


def names_in(folder: str) -> list[str]:
    """What a folder of the kernel's has, sorted; empty without it."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def text_in(path: str) -> str:
    """Content of a file of the kernel's; empty without it."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


# --- the program --------------------------------------------------------------------------------------


def program(rule: Iterable[Only], spares_root: bool = False) -> bytes:
    """Assemble the instructions: 0 denies, 1 leaves access to the file's permissions.

    Args: spares_root: processes of root may open everything.
    """
    code: list[bytes] = []
    if spares_root:
        # The helper may overwrite r1 to r5, the device's facts with it.
        code += [_insn(0xBF, 6, 1), _insn(0x85, imm=_GET_UID_GID), _insn(0xBF, 1, 6)]
        # Of the low half, which is the uid.
        code += [_insn(0xBC, 0, 0), _insn(0x55, 0, off=2), *_answer(1)]
    code += [
        _insn(0x61, 2, 1, off=0),  # r2 = type and access
        _insn(0x57, 2, imm=0xFFFF),
        _insn(0x61, 3, 1, off=4),  # r3 = major
        _insn(0x61, 4, 1, off=8),  # r4 = minor
        _insn(0x15, 2, off=2, imm=_CHAR),
        *_answer(1),
    ]
    for major, minors, is_only in rule:
        body: list[bytes] = []
        for minor in minors:
            # On to the next comparison unless it is this one.
            body += [_insn(0x55, 4, off=2, imm=minor), *_answer(1 if is_only else 0)]
        body += _answer(0 if is_only else 1)
        code += [_insn(0x55, 3, off=len(body), imm=major), *body]
    return b"".join([*code, *_answer(1)])


def _answer(value: int) -> list[bytes]:
    return [_insn(0xB7, 0, imm=value), _insn(0x95)]


def _insn(code: int, dst: int = 0, src: int = 0, off: int = 0, imm: int = 0) -> bytes:
    return struct.pack("<BBhi", code, dst | src << 4, off, imm)


# --- the kernel ---------------------------------------------------------------------------------------


def load(code: bytes, name: str = "gpusched_job") -> int:
    """Load the program into the kernel; returns a descriptor. Raises: OSError."""
    licence, text = ctypes.create_string_buffer(b"GPL"), ctypes.create_string_buffer(code)
    at = (ctypes.addressof(text), ctypes.addressof(licence))
    # type, count, code, licence, then the verifier's log and the kernel's version left out, flags, name
    attr = struct.pack("=IIQQIIQII16s", _TYPE_DEVICE, len(code) // 8, *at, 0, 0, 0, 0, 0, name.encode())
    return _bpf(_PROG_LOAD, attr)


def attach(cgroup: str, program_fd: int) -> None:
    """Attach a loaded program to a control group, beside existing ones. Raises: OSError."""
    with _Folder(cgroup) as fd:
        _bpf(_PROG_ATTACH, struct.pack("=IIII", fd, program_fd, _ATTACH_DEVICE, _ALLOW_MULTI))


def detach(cgroup: str, program_fd: int) -> None:
    """Detach one program. Raises: OSError."""
    with _Folder(cgroup) as fd:
        _bpf(_PROG_DETACH, struct.pack("=IIII", fd, program_fd, _ATTACH_DEVICE, 0))


def attached(cgroup: str) -> dict[int, str]:
    """Programs on a control group: an open descriptor of each, and its name. Raises: OSError."""
    ids = (ctypes.c_uint32 * _QUERIED)()
    with _Folder(cgroup) as fd:
        attr = struct.pack("=IIIIQI", fd, _ATTACH_DEVICE, 0, 0, ctypes.addressof(ids), _QUERIED)
        (_, answer) = _bpf_answer(_PROG_QUERY, attr)
    (count,) = struct.unpack_from("=I", answer, 24)
    found: dict[int, str] = {}
    for number in ids[:count]:
        try:
            program_fd = _bpf(_GET_FD_BY_ID, struct.pack("=III", number, 0, 0))
        except FileNotFoundError:
            # Taken off meanwhile.
            continue
        info = ctypes.create_string_buffer(_INFO_BYTES)
        _bpf(_GET_INFO, struct.pack("=IIQ", program_fd, _INFO_BYTES, ctypes.addressof(info)))
        found[program_fd] = info.raw[_NAME_AT : _NAME_AT + 16].rstrip(b"\0").decode("ascii", "replace")
    return found


class _Folder:
    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


def _bpf(command: int, attr: bytes) -> int:
    return _bpf_answer(command, attr)[0]


def _bpf_answer(command: int, attr: bytes) -> tuple[int, bytes]:
    number = _SYSCALL.get(platform.machine())
    if number is None:
        raise OSError(f"device rules are not known for {platform.machine()}")
    # Zero-padded: the kernel rejects unknown non-zero fields.
    block = ctypes.create_string_buffer(attr, _ATTR_BYTES)
    answer = ctypes.CDLL(None, use_errno=True).syscall(number, command, block, _ATTR_BYTES)
    if answer < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(answer), block.raw
