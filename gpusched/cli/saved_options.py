"""Options that are kept under a name, in files of the site and of the user: templates of gsub, and views of gq."""

from __future__ import annotations

import os
import stat

from gpusched import paths
from gpusched.errors import Refused
from gpusched.model.units import printable
from gpusched.paths import read_at_most

LIST = "list"
"""In place of a name: show them all."""
MAX_BYTES = 1 << 16


class Template:
    """One file."""

    __slots__ = ("is_of_site", "name", "path")

    def __init__(self, name: str, path: str, is_of_site: bool) -> None:
        self.name = name
        self.path = path
        self.is_of_site = is_of_site

    @property
    def source(self) -> str:
        """Whose it is, in a word."""
        return "site" if self.is_of_site else "user"

    def read(self) -> bytes:
        """The content. Raises: Refused when it cannot be read, or is the site's and others than root can write it."""
        shown = printable(self.path)
        try:
            with open(self.path, "rb") as file:
                if self.is_of_site:
                    for what, found in ((os.path.dirname(self.path), None), (self.path, os.fstat(file.fileno()))):
                        _check_trusted(what, found or os.stat(what))
                return read_at_most(file, MAX_BYTES, f"the template {shown}", "a template holds #GSUB lines")
        except OSError as error:
            raise Refused(f"the template {shown} cannot be read: {error.strerror}", f"look at: ls -l {shown}") from None

    def describe(self) -> tuple[str, str]:
        """Its options, and its first comment."""
        about, options = "", []
        for line in self.read().decode("utf-8", "replace").split("\n"):
            if line.startswith("#GSUB "):
                options.append(line[6:].strip())
            elif line.startswith("#") and not line.startswith("#!") and not about:
                about = line.strip("# \t\r")
        return " ".join(options), about


def _check_trusted(path: str, found: os.stat_result) -> None:
    if found.st_uid != 0 or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        shown = printable(path)
        raise Refused(
            f"{shown} can be written by others than root, and is not used as a template of the site",
            f"sudo chown root {shown} && sudo chmod go-w {shown}",
        )


def templates() -> dict[str, Template]:
    """All templates by name; a user's own hides one of the site."""
    found = {}
    for folder, is_of_site in ((paths.site_templates(), True), (paths.own_templates(), False)):
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        for name in names:
            if _is_name(name) and os.path.isfile(f"{folder}/{name}"):
                found[name] = Template(name, f"{folder}/{name}", is_of_site)
    return found


def _is_name(text: str) -> bool:
    """Whether it names a template: editors' copies do not."""
    return text[:1].isalnum() and text != LIST and all(one.isalnum() or one in "-_." for one in text) and text.isascii()


def saved_views() -> dict[str, str]:
    """The options of each view, as they are in the file. Raises: Refused."""
    path = paths.views_file()
    try:
        with open(path, "rb") as file:
            content = paths.read_at_most(file, paths.MAX_TEXT, printable(path), f"look at: ls -l {path}")
        lines = content.decode().split("\n")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise Refused(f"the views in {printable(path)} cannot be read: {why}", f"look at: ls -l {path}") from None
    found = {}
    for line in lines:
        name, equals, options = line.partition("=")
        if equals and not line.lstrip().startswith("#"):
            found[name.strip()] = options.strip()
    return found
