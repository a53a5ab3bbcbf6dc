"""The contents of a snapshot of a folder. Paths are bytes, relative to its top: names may contain any byte."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from gpusched.errors import Refused
from gpusched.model.units import printable
from gpusched.paths import MAX_TEXT, read_at_most

IGNORE_FILE = b".gpuschedignore"
_DROPPED = (b"__pycache__",)
"""Rebuilt on demand, and stale beside older files."""
_OWN_LOG = re.compile(rb"gpusched-\d+(_\d+)?\.out(\.\d+)?")
"""Jobs write it here by default: it would make every snapshot unique."""
_GIT_ENV = {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
_OTHERS = ("DIR", "WORK_TREE", "INDEX_FILE", "PREFIX", "COMMON_DIR", "NAMESPACE", "OBJECT_DIRECTORY")
"""Set in a git hook: they name the hook's repository, whichever folder git is asked about."""


@dataclass
class Repository:
    """One git work tree inside the snapshot."""

    path: str
    """Relative to the top, `.` for the top itself."""
    commit: str | None
    """None before the first commit."""
    has_new_files: bool
    """Whether there are files that it neither tracks nor ignores."""


@dataclass
class Listing:
    """All entries of one tree."""

    root: bytes
    files: dict[bytes, os.stat_result] = field(default_factory=dict)
    links: dict[bytes, bytes] = field(default_factory=dict)
    """Symbolic links and their targets."""
    folders: set[bytes] = field(default_factory=set)
    """Folders that must exist although nothing in them is kept."""
    live: set[bytes] = field(default_factory=set)
    """Ignored, thus not code: linked to the original instead of copied."""
    left_out: list[bytes] = field(default_factory=list)
    """Sockets, pipes and devices."""
    repositories: list[Repository] = field(default_factory=list)

    def add(self, path: bytes) -> None:
        """Add one entry other than a folder; a vanished one is skipped."""
        full = os.path.join(self.root, path)
        try:
            found = os.lstat(full)
            if stat.S_ISLNK(found.st_mode):
                self.links[path] = _target(self.root, path, os.readlink(full))
            elif stat.S_ISREG(found.st_mode):
                self.files[path] = found
            elif not stat.S_ISDIR(found.st_mode):
                self.left_out.append(path)
        except FileNotFoundError:
            pass  # deleted, and known to git still


def _target(root: bytes, path: bytes, target: bytes) -> bytes:
    """Make a relative link that leads out of the tree refer to the same place from the copy."""
    place = os.path.normpath(os.path.join(root, os.path.dirname(path), target))
    inside = place == root or place.startswith(root + b"/")
    return target if inside or target.startswith(b"/") else place


def list_tree(folder: bytes, mode: str) -> Listing:
    """List the tree of a folder: `git`, `copy` (the folder itself), or `auto`, git where there is a work tree.

    Raises: Refused when a part of it is unreadable, or for `git` without a work tree.
    """
    if mode != "copy":
        root = _top(folder, must=mode == "git")
        if root is not None:
            return _by_git(root)
    listing = Listing(folder)
    patterns = _patterns(folder)
    _walk(listing, b"", patterns)
    return listing


def _top(folder: bytes, must: bool) -> bytes | None:
    shown = printable(os.fsdecode(folder))
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--show-toplevel"], cwd=folder, capture_output=True, env=_environment()
        )
    except FileNotFoundError:
        if must:
            raise Refused("git is not installed", "take a plain copy with: --snapshot=copy") from None
        return None
    if done.returncode == 0 and (top := done.stdout.rstrip(b"\n")):
        return os.path.realpath(top)
    if b"not a git repository" in done.stderr and not must:
        return None
    said = done.stderr.decode(errors="replace").strip().partition("\n")[0] or "it is a bare repository"
    raise Refused(f"{shown} cannot be read by git: {printable(said)}", "take a plain copy with: --snapshot=copy")


def _environment() -> dict[str, str]:
    others = {f"GIT_{name}" for name in _OTHERS}
    return {**{name: text for name, text in os.environ.items() if name not in others}, **_GIT_ENV}


def _git(root: bytes, *words: str) -> bytes:
    done = subprocess.run(
        ["git", "-c", "core.quotePath=false", *words], cwd=root, capture_output=True, env=_environment()
    )
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise Refused(f"git {words[0]} failed: {printable(said)}", "take a plain copy with: --snapshot=copy")
    return done.stdout


def _by_git(root: bytes) -> Listing:
    listing = Listing(root)
    _add_repository(listing, b"", _patterns(root))
    return listing


def _add_repository(listing: Listing, prefix: bytes, patterns: list[str]) -> None:
    """Add files that git tracks or does not ignore below a folder, including submodules and nested repositories."""
    root = os.path.join(listing.root, prefix) if prefix else listing.root
    inner: list[bytes] = []
    known = _git(root, "ls-files", "-z", "--stage").split(b"\0")
    paths = {entry.partition(b"\t")[2]: entry[:6] for entry in known if entry}
    others = [path for path in _git(root, "ls-files", "-z", "--others", "--exclude-standard").split(b"\0") if path]
    others = [path for path in others if not (_OWN_LOG.fullmatch(os.path.basename(path)) or _is_dropped(path))]
    for path in (*paths, *others):
        full = os.path.join(prefix, path)
        if paths.get(path) == b"160000" or path.endswith(b"/"):
            inner.append(full.rstrip(b"/"))
        elif (live := _ignored(full, patterns)) is not None:
            listing.live.add(live)
        else:
            listing.add(full)
    ignored = _git(root, "ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory").split(b"\0")
    for path in ignored:
        full = os.path.join(prefix, path).rstrip(b"/")
        if path and os.path.basename(full) not in _DROPPED and not full.endswith(b".pyc"):
            listing.live.add(full)
    try:
        commit: str | None = _git(root, "rev-parse", "--verify", "--quiet", "HEAD").decode().strip()
    except Refused:
        commit = None  # before the first commit
    listing.repositories.append(Repository(os.fsdecode(prefix or b"."), commit, bool(others)))
    for path in inner:
        if os.path.exists(os.path.join(listing.root, path, b".git")):
            _add_repository(listing, path, patterns)
        elif os.path.isdir(os.path.join(listing.root, path)):
            # A submodule that was never fetched is an empty folder.
            listing.folders.add(path)


def _is_dropped(path: bytes) -> bool:
    return any(part in _DROPPED for part in path.split(b"/"))


def changes(listing: Listing, repository: Repository) -> bytes | None:
    """Diff against the commit, for people; None when git fails, as where a filter is not installed."""
    root = listing.root if repository.path == "." else os.path.join(listing.root, os.fsencode(repository.path))
    try:
        return _git(root, "diff", "--binary", "--no-ext-diff", "--no-textconv", "HEAD")
    except Refused:
        return None


def _walk(listing: Listing, folder: bytes, patterns: list[str]) -> None:
    full = os.path.join(listing.root, folder)
    try:
        entries = sorted(os.scandir(full), key=lambda entry: entry.name)
    except OSError as error:
        raise unreadable(full, error) from None
    if folder and not entries:
        listing.folders.add(folder)
    for entry in entries:
        path = os.path.join(folder, entry.name)
        if entry.name in (*_DROPPED, b".git") or _OWN_LOG.fullmatch(entry.name):
            continue
        if _ignored(path, patterns) is not None:
            listing.live.add(path)
        elif entry.is_dir(follow_symlinks=False):
            _walk(listing, path, patterns)
        else:
            listing.add(path)


def _patterns(root: bytes) -> list[str]:
    """Lines of the tree's own ignore list."""
    try:
        path = os.path.join(root, IGNORE_FILE)
        with open(path, "rb") as file:
            content = read_at_most(file, MAX_TEXT, printable(os.fsdecode(path)), "it holds a pattern on each line")
        lines = os.fsdecode(content).split("\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(os.path.join(root, IGNORE_FILE), error) from None
    return [line.strip().strip("/") for line in lines if line.strip() and not line.lstrip().startswith("#")]


def _ignored(path: bytes, patterns: list[str]) -> bytes | None:
    """The path itself, or its outermost parent, whose path or name matches a pattern."""
    if not patterns:
        return None
    for head in _heads(os.fsdecode(path)):
        if any(fnmatchcase(name, pattern) for pattern in patterns for name in (head, os.path.basename(head))):
            return os.fsencode(head)
    return None


def _heads(path: str) -> Iterator[str]:
    """Yield `a`, `a/b`, `a/b/c` for `a/b/c`."""
    at = path.find("/")
    while at != -1:
        yield path[:at]
        at = path.find("/", at + 1)
    yield path


def unreadable(path: bytes, error: OSError) -> Refused:
    """Error for a part of the tree that cannot be read."""
    shown = printable(os.fsdecode(path))
    return Refused(
        f"{shown} cannot be read for the snapshot: {error.strerror}",
        "make it readable, or name it in .gitignore or .gpuschedignore: what is ignored is linked, not copied",
    )
