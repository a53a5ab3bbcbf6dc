"""What the commands about jobs share: query strings, and Slurm's short words for states."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpusched.cli.parse import Values

COMPACT = {
    "PENDING": "PD",
    "RUNNING": "R",
    "COMPLETING": "CG",
    "SUSPENDED": "S",
    "COMPLETED": "CD",
    "FAILED": "F",
    "CANCELLED": "CA",
    "TIMEOUT": "TO",
    "OUT_OF_MEMORY": "OOM",
    "NODE_FAIL": "NF",
    "PREEMPTED": "PR",
    "DEADLINE": "DL",
}
"""Slurm's short forms; the same table as model.states, which is too heavy to import at the prompt."""


def query(values: Values) -> str:
    """The query string of the filters."""
    parts = {
        "ids": ",".join(values.get("ids", ())),
        "states": ",".join(values.get("states", ())),
        "users": ",".join([*values.get("users", ()), *mine(values)]),
        "names": ",".join(values.get("names", ())),
        "queues": ",".join(values.get("queues", ())),
        "limit": str(values.get("limit", "")),
        "since": str(values.get("since", "")),
    }
    return "&".join(f"{key}={quote(value)}" for key, value in parts.items() if value)


def quote(text: str) -> str:
    """Percent-encode a query value; as urllib does, without its import."""
    safe = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-~,@"
    return "".join(chr(byte) if byte in safe else f"%{byte:02X}" for byte in text.encode("utf-8", "surrogateescape"))


def mine(values: Values) -> list[str]:
    """The caller's name when --me was given."""
    if not values.get("me"):
        return []
    import os
    import pwd

    return [pwd.getpwuid(os.geteuid()).pw_name]
