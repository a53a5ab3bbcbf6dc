"""sprio: the parts of pending jobs' priorities."""

from __future__ import annotations

import sys

from gpusched.addons.slurm.command import Command, cluster_suffix, comma_list, run, user_named
from gpusched.addons.slurm.format import PrintField, percent_pieces, render
from gpusched.cli.query import quote
from gpusched.client import connect
from gpusched.errors import NotFound, UsageError
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from gpusched.addons.slurm.command import Parsed

    Json = dict[str, Any]

COMMAND = Command(
    "sprio",
    "sprio [options]",
    """
--federation  accepted: there is one cluster
-h --noheader  print no header
-j --jobs IDS  only these jobs
-l --long  all factors, including nice
--local  accepted: there is one cluster
-M --clusters --cluster NAMES  this cluster's name, or all
-n --norm  normalized factors, from 0 to 1
-o --format FORMAT  columns such as '%i %Y %A'
-p --partition NAMES  only jobs in these partitions
--sibling  accepted: there is one cluster
-S --sort FIELDS  sort order, by letters of --format
-u --user NAMES  only jobs of these users
-v --verbose  accepted: there is nothing more to print
-w --weights  the weights of the factors
""",
)
_DEFAULT = "%.15i %9r %.10Y %.10S %.10A %.10F %.10J %.10P %.10Q"
_LONG = "%.15i %9r %.8u %.10Y %.10S %.10A %.10B %.10F %.10J %.10P %.10Q %.11N %.20T"
_NORM = "%.15i %9r %.10y %.10S %.10a %.10f %.10j %.10p %.10q"
_NORM_LONG = "%.15i %9r %.8u %.10y %.10S %.10a %.10b %.10f %.10j %.10p %.10q %.11N %.20t"
_MOST = 4_294_967_295
_PARTS = {"A": "age", "F": "fairshare", "J": "size", "P": "queue", "Q": "qos"}
"""Slurm's parts by the letter of their points, and ours; all others count as the site's."""


class PriorityRow:
    """One job with its parts, or the weights."""

    def __init__(self, job: Json | None, weights: dict[str, float]) -> None:
        self.job = job
        self.weights = weights
        self.parts: dict[str, float] = {} if job is None else job["parts"]

    def of_job(self, key: str) -> str:
        """A text of the job; empty in the row of weights."""
        return "" if self.job is None else printable(str(self.job[key] or ""))

    def points(self, name: str) -> str:
        """Points of a part, or its weight."""
        return f"{self.weights.get(name, 0.0) if self.job is None else self.parts.get(name, 0.0):.0f}"

    def factor(self, name: str) -> str:
        """A part from 0 to 1, or its weight."""
        if self.job is None:
            return self.points(name)
        weight = self.weights.get(name, 0.0)
        return f"{self.parts.get(name, 0.0) / weight if weight else 0.0:.7f}"

    @property
    def nice_points(self) -> float:
        """Points that nice takes away."""
        return self.weights.get("nice", 0.0) / 2 - self.parts.get("nice", 0.0) if "nice" in self.parts else 0.0

    @property
    def site(self) -> str:
        """Points of all parts that Slurm does not have, so that the parts sum up to the priority."""
        if self.job is None:
            return "1"
        known = sum(round(self.parts.get(name, 0.0)) for name in _PARTS.values())
        return str(round(self.job["priority"]) - known + round(self.nice_points))

    @property
    def priority(self) -> str:
        return "" if self.job is None else f"{self.job['priority']:.0f}"

    @property
    def norm(self) -> str:
        return "" if self.job is None else f"{max(0.0, self.job['priority']) / _MOST:.14f}"


def _points(letter: str) -> Callable[[PriorityRow], str]:
    return lambda row: row.points(_PARTS[letter])


def _factor(letter: str) -> Callable[[PriorityRow], str]:
    return lambda row: row.factor(_PARTS[letter])


_TITLES = {"A": "AGE", "F": "FAIRSHARE", "J": "JOBSIZE", "P": "PARTITION", "Q": "QOS"}
LETTERS: dict[str, PrintField] = {
    **{letter: PrintField(title, _points(letter)) for letter, title in _TITLES.items()},
    **{letter.lower(): PrintField(title, _factor(letter)) for letter, title in _TITLES.items()},
    "b": PrintField("ASSOC", lambda row: "0" if row.job is None else "0.0000000"),
    "B": PrintField("ASSOC", lambda row: "0"),
    "c": PrintField("CLUSTER", lambda row: "N/A"),
    "i": PrintField("JOBID", lambda row: "Weights" if row.job is None else row.of_job("id")),
    "N": PrintField("NICE", lambda row: "" if row.job is None else f"{row.nice_points:.0f}"),
    "o": PrintField("ACCOUNT", lambda row: row.of_job("account")),
    "r": PrintField("PARTITION", lambda row: row.of_job("queue")),
    "S": PrintField("SITE", lambda row: row.site),
    "t": PrintField("TRES", lambda row: ""),
    "T": PrintField("TRES", lambda row: ""),
    "u": PrintField("USER", lambda row: row.of_job("user")),
    "y": PrintField("PRIORITY", lambda row: row.norm),
    "Y": PrintField("PRIORITY", lambda row: row.priority),
}


def main() -> int:
    return run(COMMAND, body)


def body(options: Parsed) -> int:
    if options.operands:
        raise COMMAND.refuse(f"unexpected argument '{printable(options.operands[0])}'")
    form = options.get("format")
    if not form:
        is_long = options.has("long")
        form = (_NORM_LONG if is_long else _NORM) if options.has("norm") else _LONG if is_long else _DEFAULT
    try:
        pieces = percent_pieces(form, LETTERS)
    except ValueError as error:
        raise COMMAND.error(f"Invalid priority format specification: {printable(str(error))}") from None
    with connect() as client:
        if options.has("clusters"):
            cluster_suffix(COMMAND, client, options.get("clusters"))
        try:
            answer = client.call("GET", f"/v1/priorities?{_query(options)}")
        except NotFound:
            answer = {**client.call("GET", "/v1/priorities?limit=1"), "priorities": []}
        except UsageError:
            raise COMMAND.error(f"Invalid job id: {printable(options.get('jobs'))}") from None
    weights = answer["weights"]
    rows = (
        [PriorityRow(None, weights)]
        if options.has("weights")
        else [PriorityRow(job, weights) for job in answer["priorities"]]
    )
    is_chosen = any(options.has(name) for name in ("jobs", "user", "partition"))
    if not rows and is_chosen:
        sys.stdout.write("Unable to find jobs matching user/id(s) specified\n")
        return 0
    _sort(rows, options.get("sort"))
    sys.stdout.write(render(pieces, rows, header=not options.has("noheader")))
    if answer["order"] != "multifactor":
        COMMAND.note(f"the queue is ordered by {answer['order']}, not by the sum of these factors; see: gq --priority")
    return 0


def _query(options: Parsed) -> str:
    """The jobs asked for. Raises: CommandError."""
    ids = comma_list(options.all("jobs"))
    for word in ids:
        if not (word[:1].isdigit() and all(char in "0123456789_" for char in word)):
            raise COMMAND.error(f"Invalid job id: {printable(word)}")
    users = [_user(word) for word in comma_list(options.all("user"))]
    parts = {"ids": ids, "users": users, "queues": comma_list(options.all("partition"))}
    return "&".join(f"{key}={quote(','.join(words))}" for key, words in parts.items() if words)


def _user(word: str) -> str:
    """The name of a user, also for a number. Raises: CommandError."""
    try:
        return user_named(word)
    except KeyError:
        raise COMMAND.error(f"Invalid user: {printable(word)}") from None


def _sort(rows: list[PriorityRow], text: str) -> None:
    """By letters, the first the most important; by id without any. Raises: CommandError."""
    words = [word.strip() for word in text.split(",") if word.strip()] or ["i"]
    for word in reversed(words):
        field = LETTERS.get(word.lstrip("+-"))
        if field is None:
            raise COMMAND.error(f"Invalid sort specification: {printable(word)}")

        def key(row: PriorityRow, cell: Callable[[PriorityRow], str] = field.cell) -> tuple[float, str]:
            found = cell(row).partition("_")[0]
            return (float(found), "") if found.lstrip("-").replace(".", "", 1).isdigit() else (0.0, found)

        rows.sort(key=key, reverse=word.startswith("-"))
