"""Did you mean: the known word that a misspelt one stands for."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_CUTOFF = 0.75
"""Below it two words share letters by chance: `input` and `output`, `gpu` and `cpu`."""


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` is a slip of; None when none is near or the nearest means something else.

    `--gpus-per-task` is no slip of `--cpus-per-task`: what sets the two apart is a word that other names use.
    """
    from difflib import get_close_matches  # the prompt pays for it only when something is wrong already

    names = list(known)
    own = _words(word)
    vocabulary = {part for name in names for part in _words(name)} if len(own) > 1 else set()
    near = get_close_matches(word, names, n=3, cutoff=_CUTOFF)
    return next((name for name in near if not (own - _words(name)) & vocabulary), None)


def _words(name: str) -> set[str]:
    """The words of a name of several, each without the s of a plural."""
    parts = "".join(char if char.isalnum() else " " for char in name.lower()).split()
    return {part.rstrip("s") or part for part in parts}
