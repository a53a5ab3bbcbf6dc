"""The files that gpusched's installation for everybody puts on a machine, and where they come from."""

from __future__ import annotations

import os
import sys
import sysconfig
from dataclasses import dataclass

import gpusched
from gpusched.errors import NotReady

UNIT = "gpusched.service"
METRICS = "gpusched-metrics.service"
GUARD = "gpusched-guard.service"
UNITS = "/etc/systemd/system"
_WRITTEN_FOR = "/opt/gpusched/bin/"
"""Where the unit files say that the commands are."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where to install from and to."""

    folder: str
    """Of the commands, absolute."""
    root: str = ""
    """What the paths written to begin with; with any, systemd is left alone."""
    launcher: str = "auto"
    """The setting [daemon] launcher."""
    checkpoint_dir: str | None = None
    """The setting [life] checkpoint_dir."""

    def at(self, path: str) -> str:
        """A path of the machine below the root."""
        return self.root + path


def source(name: str) -> str:
    """The text of a file that comes with gpusched, for /etc."""
    package = os.path.dirname(os.path.abspath(gpusched.__file__))
    for folder in (os.path.join(package, "systemd"), os.path.join(os.path.dirname(package), "systemd")):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                return file.read()
    raise NotReady(f"{name} is missing from this installation", "install gpusched again with pip")


def unit_text(name: str, site: Site) -> str:
    """A unit file with the paths of this installation."""
    text = source(name).replace(_WRITTEN_FOR, os.path.join(site.folder, ""))
    if name == UNIT and site.checkpoint_dir:
        # Not there yet: the first run that needs it makes it.
        text = text.replace("\nProtectHome=", f"\nReadWritePaths=-{site.checkpoint_dir}\nProtectHome=")
    return text


def commands_folder() -> str:
    """Where this installation's commands are. Raises: NotReady."""
    for folder in (os.path.dirname(os.path.abspath(sys.executable)), sysconfig.get_path("scripts")):
        if os.path.exists(os.path.join(folder, "gpuschedd")):
            return folder
    raise NotReady(
        f"there is no gpuschedd beside {sys.executable}",
        "install gpusched with pip in an environment of its own: sudo python3 -m venv /opt/gpusched",
    )
