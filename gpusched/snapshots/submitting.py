"""From a submission to one whose runs start in a copy of its folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpusched.snapshots.keep import Limits, freeze

Call = Callable[[str, str], dict[str, Any]]
"""A request to the daemon: method and path."""


def start_in_copy(call: Call, socket_path: str, spec: dict[str, Any], mode: str) -> dict[str, Any]:
    """Keep the tree that `work_dir` is in, and point the submission there; relative outputs stay where they were.

    Returns: what is known of the copy. Raises: Refused.
    """
    limits = call("GET", "/v1/status")["daemon"]["limits"]

    def needed() -> set[str]:
        return {name for (name,) in call("GET", "/v1/jobs?fields=snapshot")["rows"] if name}

    wanted = Limits(limits["snapshot_mib"], limits["snapshot_files"], limits["snapshot_keep_days"])
    found = freeze(spec["work_dir"], mode, socket_path, wanted, needed)
    spec["submit_dir"], spec["work_dir"], spec["snapshot"] = spec["work_dir"], found.work_dir, found.name
    return found.about
