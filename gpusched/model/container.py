"""What a submission may say of a container: the image, and what of the host is mounted in it. Pure texts."""

from __future__ import annotations

import posixpath

from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

PODMAN, APPTAINER = "podman", "apptainer"
RUNTIMES = (PODMAN, APPTAINER)
_SIGNS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-/:@+")
_MAX_IMAGE = 1024
_SHUT = ("/dev", "/run", "/var/run", "/proc", "/sys")
"""Folders of the host that no job may mount: devices, sockets of daemons, the kernel's."""
_ENGINE_SOCKETS = ("docker.sock", "podman.sock", "containerd.sock", "crio.sock", "buildkitd.sock")


class Bind:
    """A folder or file of the host in the container."""

    __slots__ = ("is_read_only", "source", "target")

    def __init__(self, source: str, target: str, is_read_only: bool = False) -> None:
        self.source = source
        self.target = target
        self.is_read_only = is_read_only


def is_image_file(image: str) -> bool:
    """Whether the image is a file for apptainer rather than a reference to a registry."""
    return image.endswith(".sif")


def why_no_image(image: str) -> str | None:
    """Why a text names no image, to follow `--image`; None if it does."""
    shown = printable(repr(image), 80)
    if is_image_file(image):
        is_path = posixpath.isabs(image) and ":" not in image and image.isprintable()
        return None if is_path else f"{shown} is not the path of a .sif file"
    name, _, digest = image.partition("@")
    is_plain = image.isascii() and _SIGNS.issuperset(image) and image[:1].isalnum() and len(image) <= _MAX_IMAGE
    if not is_plain or "//" in image or name[-1:] in ("", "/", ":"):
        return f"{shown} is not an image reference"
    if digest and not is_digest(digest):
        return f"{printable(repr(digest), 80)} is not a digest, which has the form sha256: and 64 hexadecimal digits"
    return None


def is_digest(text: str) -> bool:
    """Whether it is `sha256:` and 64 hexadecimal digits."""
    algorithm, _, digits = text.partition(":")
    return algorithm == "sha256" and len(digits) == 64 and all(sign in "0123456789abcdef" for sign in digits)


def is_pinned(image: str) -> bool:
    """Whether a pull may name this as what it found: a reference with a digest, an image's id, or a .sif file."""
    if why_no_image(image) is not None:
        return False
    return is_image_file(image) or is_digest(image.rpartition("@")[2])


def is_allowed(image: str, allowed: Collection[str]) -> bool:
    """Whether an image comes from one of these registries, repositories or folders; without any, all do."""
    path = posixpath.normpath(image) if is_image_file(image) else image
    return not allowed or any(
        path == one or path.startswith((f"{one.rstrip('/')}/", f"{one}:", f"{one}@")) for one in allowed
    )


def read_bind(text: str) -> Bind:
    """`HOST:CONTAINER`, `HOST:CONTAINER:ro`, or `HOST` for the same path. Raises: ValueError."""
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    target = target or source
    if not posixpath.isabs(source) or not posixpath.isabs(target) or mode not in ("", "ro", "rw"):
        raise ValueError(f"{printable(repr(text), 80)} is not HOST:CONTAINER or HOST:CONTAINER:ro with absolute paths")
    if "," in text or not text.isprintable():
        raise ValueError(f"{printable(repr(text), 80)} has a comma or a control character in its path")
    source, target = posixpath.normpath(source), posixpath.normpath(target)
    if target == "/":
        raise ValueError("nothing can be mounted over the whole container, /")
    return Bind(source, target, mode == "ro")


def why_not_mounted(source: str) -> str | None:
    """Why this path of the host, normalised, is not mounted into containers; None if it may be."""
    for folder in _SHUT:
        if source == folder or source.startswith(f"{folder}/"):
            return f"{source} of the host is not mounted into containers: {folder} has devices or sockets of daemons"
    if source == "/":
        return "/ of the host is not mounted into containers: it has devices and sockets of daemons"
    if posixpath.basename(source) in _ENGINE_SOCKETS:
        return f"{source} is not mounted into containers: who can reach it starts containers without limits"
    return None


def by_hand(runtime: str, image: str) -> str:
    """What to type to see why an image cannot be pulled."""
    if is_image_file(image):
        return f"ls -l {image}"
    return f"podman pull {image}" if runtime == PODMAN else f"apptainer pull docker://{image}"


def runtime_of(pinned: str) -> str:
    """What has pulled an image: apptainer keeps files, podman a storage with digests."""
    return APPTAINER if is_image_file(pinned) else PODMAN
