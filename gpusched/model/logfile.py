"""Names of output files that were put aside because they had grown (`gsub --log-max`)."""

from __future__ import annotations


def put_aside(path: str, number: int) -> str:
    """The file put aside so many rotations ago; 0 is the one that is written to."""
    return f"{path}.old{number}" if number else path
