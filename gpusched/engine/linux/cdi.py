"""Names of GPUs by the Container Device Interface: which one names the device node that a run was given.

podman 4.3 calls a specification that it cannot read "unresolvable", as it does a device that is missing, and a
specification from before a change of cards may lend the wrong one. So it is read here first.

Specifications are JSON or, as nvidia-ctk writes them, YAML in block style: a reader for that style alone is below.
"""

from __future__ import annotations

import os

from gpusched.model.units import is_digits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any

FOLDERS = ("/etc/cdi", "/var/run/cdi")
KIND = "nvidia.com/gpu"
GENERATE = "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"


class CdiError(Exception):
    """Why GPUs cannot be given to a container, in one sentence."""


class CdiDevice:
    """One device of a specification."""

    __slots__ = ("name", "nodes")

    def __init__(self, name: str, nodes: frozenset[str]) -> None:
        self.name = name
        self.nodes = nodes
        """Paths of its device nodes."""

    @property
    def minors(self) -> frozenset[int]:
        """N of each /dev/nvidiaN among its nodes."""
        numbers = (path.removeprefix("/dev/nvidia") for path in self.nodes)
        return frozenset(int(number) for number in numbers if is_digits(number))


def read_devices(folders: Sequence[str] = FOLDERS) -> list[CdiDevice]:
    """The GPUs that specifications in these folders name. Raises: CdiError for one that cannot be read."""
    found: list[CdiDevice] = []
    for folder in folders:
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        for name in names:
            if name.endswith((".json", ".yaml", ".yml")):
                found += _devices_in(f"{folder}/{name}")
    return found


def _devices_in(path: str) -> list[CdiDevice]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise CdiError(f"the CDI specification {path} cannot be read: {error.strerror}") from None
    try:
        return devices_of(text)
    except (ValueError, TypeError, AttributeError) as error:
        raise CdiError(f"the CDI specification {path} cannot be understood: {error}") from None


def devices_of(text: str) -> list[CdiDevice]:
    """The GPUs of one specification; none if it is of another kind. Raises: ValueError."""
    if text.lstrip()[:1] == "{":
        import json  # nvidia-ctk writes YAML

        found = json.loads(text)
    else:
        found = read_yaml(text)
    if not isinstance(found, dict) or found.get("kind") != KIND:
        return []
    devices = []
    for device in found.get("devices") or []:
        nodes = (device.get("containerEdits") or {}).get("deviceNodes") or []
        paths = frozenset(str(node.get("hostPath") or node["path"]) for node in nodes)
        devices.append(CdiDevice(str(device["name"]), paths))
    return devices


def names_for(gpus: Iterable[tuple[str, int | None]], devices: Sequence[CdiDevice]) -> list[str]:
    """CDI names of these GPUs, by UUID and N of their /dev/nvidiaN, None for a MIG instance, which has its name alone.

    Raises: CdiError.
    """
    return [f"{KIND}={_name_for(uuid, minor, devices)}" for uuid, minor in gpus]


def _name_for(uuid: str, minor: int | None, devices: Sequence[CdiDevice]) -> str:
    if not devices:
        raise CdiError(f"no CDI specification in {' or '.join(FOLDERS)} names a GPU: {GENERATE}")
    by_name = next((device for device in devices if device.name == uuid), None)
    if minor is None:
        if by_name is None:
            raise CdiError(f"the CDI specification is stale, it lacks {uuid}: {GENERATE}")
        return by_name.name
    own = frozenset({minor})
    if by_name is not None:
        if by_name.minors != own:
            raise CdiError(f"the CDI specification is stale, {uuid} is /dev/nvidia{minor} by now: {GENERATE}")
        return by_name.name
    # Instances of a card have its node, too, besides their own.
    whole = [one for one in devices if one.minors == own and not any("nvidia-cap" in path for path in one.nodes)]
    if not whole:
        raise CdiError(f"the CDI specification is stale, it lacks /dev/nvidia{minor}: {GENERATE}")
    return whole[0].name


# --- YAML in block style ---------------------------------------------------------------------------------


def read_yaml(text: str) -> Any:
    """Read maps, lists and scalars in block style, each value on its own line. Raises: ValueError."""
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        content = line.strip()
        if content and not content.startswith("#") and content not in ("---", "..."):
            if "\t" in line[: len(line) - len(line.lstrip())]:
                raise ValueError(f"line {number} is indented by a tab")
            lines.append(_Line(number, len(line) - len(line.lstrip(" ")), content))
    reader = _BlockReader(lines)
    found = reader.block(0) if lines else None
    if reader.at < len(lines):
        raise ValueError(f"line {lines[reader.at].number} is indented unlike those before it")
    return found


class _Line:
    __slots__ = ("content", "indent", "number")

    def __init__(self, number: int, indent: int, content: str) -> None:
        self.number = number
        self.indent = indent
        self.content = content

    @property
    def is_item(self) -> bool:
        return self.content == "-" or self.content.startswith("- ")


class _BlockReader:
    def __init__(self, lines: list[_Line]) -> None:
        self.lines = lines
        self.at = 0

    def block(self, least: int) -> Any:
        """The list or map that begins here, if its indent is at least this; else None, for no value."""
        if self.at == len(self.lines) or self.lines[self.at].indent < least:
            return None
        line = self.lines[self.at]
        return self._list(line.indent) if line.is_item else self._map(line.indent)

    def _list(self, indent: int) -> list[Any]:
        found: list[Any] = []
        while self.at < len(self.lines) and (line := self.lines[self.at]).indent == indent and line.is_item:
            rest = line.content[1:].lstrip()
            if not rest:
                self.at += 1
                found.append(self.block(indent + 1))
            elif _key_of(rest) is not None:
                # The first entry of a map follows the dash.
                inner = indent + len(line.content) - len(rest)
                self.lines[self.at] = _Line(line.number, inner, rest)
                found.append(self._map(inner))
            else:
                self.at += 1
                found.append(_scalar(rest, line.number))
        return found

    def _map(self, indent: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self.at < len(self.lines) and (line := self.lines[self.at]).indent == indent and not line.is_item:
            split = _key_of(line.content)
            if split is None:
                raise ValueError(f"line {line.number} is not an entry of a map")
            key, rest = split
            self.at += 1
            if rest:
                found[key] = _scalar(rest, line.number)
            else:
                # A list may have the indent of its key.
                is_list = self.at < len(self.lines) and self.lines[self.at].is_item
                found[key] = self.block(indent if is_list else indent + 1)
        return found


def _key_of(text: str) -> tuple[str, str] | None:
    """Key and rest of `key: value`; None for anything else."""
    if text[:1] in ('"', "'"):
        end = text.find(text[0], 1)
        if end < 0 or text[end + 1 : end + 2] != ":":
            return None
        return text[1:end], text[end + 2 :].strip()
    key, colon, rest = text.partition(":")
    if not colon or (rest and rest[0] != " "):
        return None
    return key.strip(), rest.strip()


def _scalar(text: str, number: int) -> str | list[Any] | dict[str, Any]:
    if text[0] in ('"', "'"):
        end = text.find(text[0], 1)
        if end < 0 or text[end + 1 :].strip()[:1] not in ("", "#") or "\\" in text[:end]:
            raise ValueError(f"line {number} has quoted text that cannot be read")
        return text[1:end]
    if text in ("[]", "{}"):
        return [] if text == "[]" else {}
    if text[0] in "[{|>&*!%@`":
        raise ValueError(f"line {number} is not in block style")
    return text.partition(" #")[0].rstrip()
