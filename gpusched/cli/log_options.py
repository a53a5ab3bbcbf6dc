"""The options of gsub about the size of output files."""

from __future__ import annotations

from gpusched.cli.parse import Option, whole
from gpusched.model.units import parse_size_mib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpusched.cli.parse import Values


def log_max(value: str) -> Values:
    """`100M` or `100M:5`: a size, and how many files put aside are kept."""
    size, colon, keep = value.partition(":")
    found: Values = {"log_max_mib": parse_size_mib(size)}
    # Set in either case, so that nothing of an earlier --log-max stays.
    found["log_keep"] = whole("log_keep", 0, 100)(keep)["log_keep"] if colon else None
    return found


def log_options(section: str) -> list[Option]:
    """The options, in the section that is named so."""
    return [
        Option(
            "--log-max",
            metavar="SIZE[:KEEP]",
            read=log_max,
            section=section,
            help="put an output file aside as FILE.old1 when it has grown to SIZE, and keep KEEP of them; default: let "
            "it grow; 3 kept",
        )
    ]
