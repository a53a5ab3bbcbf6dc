"""Scripts and environments on their way from the table to tickets, the last few kept at hand."""

from __future__ import annotations

from collections import OrderedDict

from gpusched.ports import Store

_KEEP = 32
_KEEP_BYTES = 1 << 20


class PayloadCache:
    """The most recently used small payloads: thousands of jobs of one sweep share two of them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: OrderedDict[str, bytes] = OrderedDict()

    def get(self, sha: str) -> bytes:
        """The payload with this SHA-256. Raises: KeyError when the table does not have it."""
        body = self._kept.get(sha)
        if body is not None:
            self._kept.move_to_end(sha)
            return body
        body = self._store.payload(sha)
        if len(body) <= _KEEP_BYTES:
            self._kept[sha] = body
            if len(self._kept) > _KEEP:
                self._kept.popitem(last=False)
        return body
