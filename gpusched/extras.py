"""How an optional library gets into this copy of gpusched: the one command that works for how it was installed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterable
from importlib import metadata
from importlib.util import find_spec

DISTRIBUTION = "gpusched-lab"
_MARKER = re.compile(r"""extra\s*==\s*(['"])([\w-]+)\1""")


def install_command(extra: str) -> str:
    """A command that installs what an extra needs into the environment of this interpreter: `... install 'mcp<3,>=2'`.

    It names the libraries, not `gpusched-lab[mcp]`, since pip could not find that where the distribution came from a
    clone, a wheel or a package.
    """
    needed = " ".join(map(shlex.quote, _requirements(extra)))
    python, is_ours = shlex.quote(sys.executable), os.access(_packages(), os.W_OK)
    if os.path.exists(os.path.join(sys.prefix, "pipx_metadata.json")):
        pipx = "pipx inject" if is_ours else "sudo pipx inject --global"
        return f"{pipx} {shlex.quote(os.path.basename(sys.prefix))} {needed}"
    sudo = "" if is_ours else "sudo "
    if find_spec("pip") is None and (uv := shutil.which("uv")) is not None:
        return f"{sudo}{shlex.quote(uv)} pip install --python {python} {needed}"
    pip = f"{sudo}{python} -m pip install {_despite_distribution()}{needed}"
    if find_spec("pip") is not None:
        return pip
    # An environment without pip, such as that of the Debian package.
    pip = f"{sudo}{python} -m ensurepip && {pip}"
    if find_spec("ensurepip") is not None:
        return pip
    return f"sudo apt install python{sys.version_info.major}.{sys.version_info.minor}-venv && {pip}"


def _requirements(extra: str) -> list[str]:
    """What the installed distribution says that the extra needs; of a copy without metadata, the extra itself."""
    try:
        found = list(_of_extra(metadata.requires(DISTRIBUTION) or (), extra))
    except metadata.PackageNotFoundError:
        found = []
    return found or [f"{os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}[{extra}]"]


def _of_extra(requirements: Iterable[str], extra: str) -> Iterable[str]:
    for one in requirements:
        text, _, marker = one.partition(";")
        if any(found.group(2) == extra for found in _MARKER.finditer(marker)):
            yield text.strip()


def _packages() -> str:
    """The folder that the distribution's libraries are in."""
    try:
        return str(metadata.distribution(DISTRIBUTION).locate_file(""))
    except metadata.PackageNotFoundError:
        return sysconfig.get_path("purelib")


def _despite_distribution() -> str:
    """The option that pip asks for where the Python is the operating system's (PEP 668) and gpusched is in it."""
    marked = os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
    return "--break-system-packages " if sys.prefix == sys.base_prefix and os.path.exists(marked) else ""
