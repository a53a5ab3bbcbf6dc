"""Points the runs of a submission at a copy of its folder."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from gpusched.errors import Refused
from gpusched.model.units import printable
from gpusched.snapshots.snapshot import TREE, SnapshotLimits, folder_in, freeze, renew

Call = Callable[[str, str], dict[str, Any]]
"""A request to the daemon: method and path."""


@dataclass(frozen=True)
class Frozen:
    """The original tree, and its copy."""

    root: str
    tree: str
    notes: tuple[str, ...]
    """What may differ from the submitter's expectations."""

    def environment(self, env: dict[str, str]) -> dict[str, str]:
        """Redirect the module search path of an environment into the copy."""
        return moved(env, self.root, self.tree)

    def ways_out(self, spec: dict[str, Any]) -> list[str]:
        """References of another submission with this copy that lead out of it."""
        return ways_out(spec, self.root, self.tree)


def start_in_copy(call: Call, socket_path: str, spec: dict[str, Any], mode: str) -> Frozen:
    """Keep the tree that contains `work_dir`, and point the submission there; relative outputs stay where they were.

    Raises: Refused.
    """
    limits = call("GET", "/v1/status")["daemon"]["limits"]

    def needed() -> set[str]:
        return {name for (name,) in call("GET", "/v1/jobs?fields=snapshot")["rows"] if name}

    wanted = SnapshotLimits(
        limits["snapshot_mib"],
        limits["snapshot_files"],
        limits["snapshot_keep_days"],
        limits["snapshot_total_mib"],
    )
    try:
        found = freeze(spec["work_dir"], mode, socket_path, wanted, needed)
    except OSError as error:
        raise Refused(
            f"the snapshot cannot be written: {error.strerror or error}",
            "see what is full with: df -h, gpusched snapshots",
        ) from None
    spec["submit_dir"], spec["work_dir"], spec["snapshot"] = spec["work_dir"], found.work_dir, found.name
    root = found.about["root"]
    tree = os.path.join(folder_in(found.work_dir, found.name) or "", TREE)
    if "env" in spec:
        spec["env"] = moved(spec["env"], root, tree)
    notes = ways_out(spec, root, tree)
    for what, names in (
        ("sockets, pipes and devices are not in the snapshot", found.about["left_out"]),
        ("changed while it was copied, so the copy may be incomplete", found.about.get("unsettled", ())),
    ):
        if names:
            notes.append(f"{what}: {', '.join(printable(name, 80) for name in names[:3])}")
    return Frozen(root, tree, tuple(notes))


def keep_for_repetition(call: Call, job_ids: Iterable[str]) -> None:
    """Ensure that the snapshots of these jobs exist, and stay while the jobs are resubmitted.

    Raises: Refused when one is gone.
    """
    gone = _gone(call, job_ids, set())
    if gone:
        raise Refused(
            f"the snapshot that job {gone} started in is gone",
            f"run the code as it is now with: gsub --resubmit {gone} -D .",
        )


def keep_for_resumption(call: Call, pipeline: str) -> None:
    """Do the same for steps of a pipeline that have not COMPLETED. Raises: Refused."""
    gone = _gone(call, [pipeline], {"COMPLETED"})
    if gone:
        raise Refused(
            f"the snapshot that step {gone} of pipeline {pipeline} started in is gone",
            "submit the pipeline again with: gsub --dag FILE",
        )


def _gone(call: Call, job_ids: Iterable[str], but: set[str]) -> str | None:
    """Return a job whose snapshot is gone, if any; renews those of the others."""
    path = f"/v1/jobs?ids={quote(','.join(job_ids), safe=',')}&states=all&fields=id,state,snapshot,work_dir"
    for job_id, state, name, work_dir in call("GET", path)["rows"]:
        if name and state not in but and not renew(work_dir, name):
            return str(job_id)
    return None


_GOES_BACK = re.compile(r"""\b(?:cd|pushd)\s+["']?\$\{?((?:SLURM|GPUSCHED)_SUBMIT_DIR)\b""")
_MOST = 3
"""Maximum number of words reported."""


def moved(env: Mapping[str, str], root: str, tree: str) -> dict[str, str]:
    """Redirect those folders of PYTHONPATH that lie in the tree to the copy.

    `export PYTHONPATH=$PWD` is a common way to find one's own modules: it must not find later versions.
    """
    found = dict(env)
    if found.get("PYTHONPATH"):
        found["PYTHONPATH"] = ":".join(_kept(entry, root, tree) or entry for entry in found["PYTHONPATH"].split(":"))
    return found


def _kept(path: str, root: str, tree: str) -> str | None:
    """The copy's path for an absolute path in the tree; None when the copy lacks it."""
    if not os.path.isabs(path) or "\0" in path:
        return None
    # Folders above may be links; the last part may be one that is kept as such.
    place = os.path.join(os.path.realpath(os.path.dirname(path.rstrip("/")) or "/"), os.path.basename(path.rstrip("/")))
    if place != root and not place.startswith(root + "/"):
        return None
    copy = os.path.normpath(os.path.join(tree, os.path.relpath(place, root)))
    inside = os.path.realpath(copy)
    is_ours = inside == tree or inside.startswith(tree + "/")
    return copy if is_ours and os.path.exists(inside) else None


def ways_out(spec: Mapping[str, Any], root: str, tree: str) -> list[str]:
    """Sentences on references of a job to the original tree, for people to fix."""
    texts = []
    script = spec.get("script") or ""
    goes_back = _GOES_BACK.search(script)
    if goes_back:
        texts.append(
            f"the script changes to ${goes_back[1]}, out of the snapshot: remove that line to start in the copy"
        )
    words = [word for word in spec.get("argv") or () if _kept(word, root, tree)]
    home = os.path.expanduser("~")
    names = [re.escape(root), re.escape(os.path.abspath(spec.get("submit_dir") or root))]
    if home != "/" and root.startswith(home + "/"):
        names.append(r"(?:~|\$\{?HOME\}?)" + re.escape(root[len(home) :]))
    for found in re.finditer(rf"(?:{'|'.join(names)})(?:/[^\s\"';:|&)>]*)?(?=[\s\"';:|&)>]|$)", script):
        word = found[0]
        path = home + re.sub(r"^(?:~|\$\{?HOME\}?)", "", word) if word[0] in "~$" else word
        if _kept(path, root, tree):
            words.append(word)
    texts += [
        f"{printable(word, 200)} is used in place, not from the snapshot: use a path relative to the folder"
        for word in list(dict.fromkeys(words))[:_MOST]
    ]
    return texts
