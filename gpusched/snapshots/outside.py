"""What of a submission leads out of its snapshot, back to the code as it is edited."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from gpusched.model.units import printable

_GOES_BACK = re.compile(r"""\b(?:cd|pushd)\s+["']?\$\{?((?:SLURM|GPUSCHED)_SUBMIT_DIR)\b""")
_MOST = 3
"""Words that are told of."""


def moved(env: Mapping[str, str], root: str, tree: str) -> dict[str, str]:
    """The environment with those folders of PYTHONPATH in the copy that lie in the tree.

    `export PYTHONPATH=$PWD` is how many find their own modules: it must not find those of later.
    """
    found = dict(env)
    if found.get("PYTHONPATH"):
        found["PYTHONPATH"] = ":".join(_kept(entry, root, tree) or entry for entry in found["PYTHONPATH"].split(":"))
    return found


def _kept(path: str, root: str, tree: str) -> str | None:
    """Where the copy has what an absolute path names in the tree; None when it has no copy of it."""
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
    """Sentences on what a job will take from the tree itself, for people to mend."""
    texts = []
    script = spec.get("script") or ""
    goes_back = _GOES_BACK.search(script)
    if goes_back:
        texts.append(
            f"the script goes to ${goes_back[1]}, out of the snapshot: it starts in the copy without that line"
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
        f"{printable(word, 200)} is used where it is, not as it is in the snapshot: name it relative to the folder"
        for word in list(dict.fromkeys(words))[:_MOST]
    ]
    return texts
