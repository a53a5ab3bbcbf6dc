"""What gshow tells of the copy of the code that a job starts in."""

from __future__ import annotations

from gpusched.snapshots.keep import about, folder_in, show_size

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def snapshot_about(job: dict[str, Any]) -> dict[str, Any] | None:
    """What is known of a job's snapshot, with its folder; None when it is gone, or another user's."""
    folder = folder_in(job["work_dir"], job["snapshot"])
    try:
        return None if folder is None else {**about(folder), "folder": folder}
    except OSError:
        return None


def snapshot_line(known: dict[str, Any] | None, name: str) -> str:
    """Commit, dirty or not, number of files, where."""
    if known is None:
        return f"{name}, which is gone or not yours"
    commit = f"commit {known['commit'][:12]}" if known["commit"] else "no commit"
    state = {None: "plain copy", True: f"{commit} with changes", False: commit}[known["is_dirty"]]
    size = show_size(known["bytes"])
    return f"{state}, {known['files']} files, {size}, in {known['folder']}"
