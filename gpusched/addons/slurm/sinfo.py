"""sinfo: nodes and partitions."""

from __future__ import annotations

import os
import sys
import time

from gpusched.addons.slurm.command import Command, cluster_suffix, comma_list, run
from gpusched.addons.slurm.format import PrintField, long_pieces, percent_pieces, render, split_spelling
from gpusched.addons.slurm.nodes import SHORT_STATES, Node, Partition, read_cluster
from gpusched.addons.slurm.values import NULL, instant, long_duration, short_duration
from gpusched.client import connect
from gpusched.model.hostlist import expand, fold
from gpusched.model.units import is_digits, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    from gpusched.addons.slurm.command import Parsed
    from gpusched.addons.slurm.format import Piece
    from gpusched.client import DaemonConnection

COMMAND = Command(
    "sinfo",
    "sinfo [options]",
    """
-a --all  no effect: no partition is hidden
-d --dead  only nodes that do not respond
-e --exact  combine only nodes with equal CPUs, memory and disk
--federation  accepted: there is one cluster
-F --future  accepted: there are no future nodes
-h --noheader  print no header
--hide  accepted: nothing is hidden
-i --iterate SECONDS  repeat at this interval
--json  print the nodes as JSON
--local  accepted: there is one cluster
-l --long  more columns
-M --clusters --cluster NAMES  this cluster's name, or all
-n --nodes NODES  only these nodes
--noconvert  accepted: memory is always in MiB
-N --Node  one line per node and partition
-o --format FORMAT  columns such as '%P %t %N'
-O --Format FIELDS  columns such as partition:10,statelong
-p --partition NAMES  only these partitions
-r --responding  only nodes that respond
-R --list-reasons  why nodes are drained
-s --summarize  one line per partition
-S --sort FIELDS  sort order, by letters of --format
-t --states STATES  only nodes in these states
-T --reservation  show reservations
-v --verbose  accepted: there is nothing more to print
""",
)
_DEFAULT = "%9P %.5a %.10l %.6D %.6t %N"
_LONG = "%9P %.5a %.10l %.10s %.4r %.8h %.10g %.6D %.11T %N"
_SUMMARY = "%9P %.5a %.10l %.16F %N"
_REASONS = "%20E %9u %19H %N"
_REASONS_LONG = "%20E %12U %19H %6t %N"


class NodeRow:
    """Nodes that are alike in all that the format shows, of a partition."""

    __slots__ = ("nodes", "partition")

    def __init__(self, partition: Partition, nodes: list[Node]) -> None:
        self.partition = partition
        self.nodes = nodes


class NodeField(PrintField):
    """A field of sinfo.

    Args:
        spelling: the letter of --format if it has one, and the names of --Format: `-a available`.
        of_partition, of_node: its value for one of these. Rows differ where these do.
        is_exact: --exact parts rows by it as well.
    """

    __slots__ = ("is_exact", "letter", "names", "of_node", "of_partition")

    def __init__(
        self,
        spelling: str,
        title: str,
        cell: Callable[[NodeRow], str] | None = None,
        *,
        of_node: Callable[[Node], str] | None = None,
        of_partition: Callable[[Partition], str] | None = None,
        is_exact: bool = False,
    ) -> None:
        self.letter, self.names = split_spelling(spelling)
        self.is_exact = is_exact
        self.of_node = of_node
        self.of_partition = of_partition
        if cell is None and of_node is not None:
            cell = lambda row: of_node(row.nodes[0]) if row.nodes else "n/a"  # noqa: E731
        elif cell is None and of_partition is not None:
            cell = lambda row: of_partition(row.partition)  # noqa: E731
        assert cell is not None
        super().__init__(title, cell)


def _least(number: Callable[[Node], int]) -> Callable[[NodeRow], str]:
    """The least of the nodes, with a plus where others have more."""

    def cell(row: NodeRow) -> str:
        found = sorted({number(node) for node in row.nodes}) or [0]
        return f"{found[0]}{'+' if len(found) > 1 else ''}"

    return cell


def _load(row: NodeRow) -> str:
    """The least of the nodes."""
    return f"{min(node.json['load_average'] for node in row.nodes):.2f}" if row.nodes else "N/A"


def _cpus(row: NodeRow) -> str:
    return "/".join(str(sum(node.cpu_counts[place] for node in row.nodes)) for place in range(4))


def _node_counts(row: NodeRow) -> tuple[int, int, int, int]:
    """Nodes allocated, idle, in another state, in total."""
    allocated = sum(node.is_busy for node in row.nodes)
    idle = sum(node.state == "idle" for node in row.nodes)
    return allocated, idle, len(row.nodes) - allocated - idle, len(row.nodes)


_sockets = _least(lambda node: node.cpus)
FIELDS = (
    NodeField("-a available", "AVAIL", of_partition=lambda one: one.state),
    NodeField("-A nodeai", "NODES(A/I)", lambda row: "{}/{}".format(*_node_counts(row))),
    NodeField("-b features_act", "ACTIVE_FEATURES", of_node=lambda node: node.features),
    NodeField("-B maxcpuspernode", "MAX_CPUS_PER_NODE", of_partition=lambda one: "UNLIMITED"),
    NodeField("-c cpus", "CPUS", _least(lambda node: node.cpus), is_exact=True),
    NodeField("-C cpusstate", "CPUS(A/I/O/T)", _cpus),
    NodeField("-d disk", "TMP_DISK", lambda row: "0", is_exact=True),
    NodeField("-D nodes", "NODES", lambda row: str(len(row.nodes))),
    NodeField("-e freemem", "FREE_MEM", _least(lambda node: int(node.json["mem_available_mib"])), is_exact=True),
    NodeField("-E reason", "REASON", of_node=lambda node: node.reason or "none"),
    NodeField("-f features", "AVAIL_FEATURES", of_node=lambda node: node.features),
    NodeField("-F nodeaiot", "NODES(A/I/O/T)", lambda row: "/".join(map(str, _node_counts(row)))),
    NodeField("-g groups", "GROUPS", of_partition=lambda one: "all"),
    NodeField("-G gres", "GRES", of_node=lambda node: node.gres),
    NodeField("-h oversubscribe share", "OVERSUBSCRIBE", of_partition=lambda one: "NO"),
    NodeField("-H timestamp", "TIMESTAMP", of_node=lambda node: instant(node.json["drained_at"], "Unknown")),
    NodeField("-i reservation", "RESERVATION", of_node=lambda node: printable(node.reservation or "")),
    NodeField("-I priorityjobfactor", "PRIO_JOB_FACTOR", of_partition=lambda one: "1"),
    NodeField("-l time", "TIMELIMIT", of_partition=lambda one: _limit(one.max_time_s)),
    NodeField("-L defaulttime", "DEFAULTTIME", of_partition=lambda one: _limit(one.default_time_s, "n/a")),
    NodeField("-m memory", "MEMORY", _least(lambda node: node.mem_mib), is_exact=True),
    NodeField("-M preemptmode", "PREEMPT_MODE", of_partition=lambda one: one.json["preempt_mode"].upper()),
    NodeField("-n nodehost", "HOSTNAMES", of_node=lambda node: node.name),
    NodeField("-N nodelist", "NODELIST", lambda row: fold(node.name for node in row.nodes)),
    NodeField("-o nodeaddr", "NODE_ADDR", of_node=lambda node: node.name),
    NodeField(
        "-O cpusload",
        "CPU_LOAD",
        _load,
        is_exact=True,
    ),
    NodeField("-p prioritytier", "PRIO_TIER", of_partition=lambda one: "1"),
    NodeField("-P partition", "PARTITION", of_partition=lambda one: one.starred),
    NodeField("-r root", "ROOT", of_partition=lambda one: "no"),
    NodeField("-R partitionname", "PARTITION", of_partition=lambda one: printable(one.name)),
    NodeField("-s size", "JOB_SIZE", of_partition=lambda one: "1-infinite"),
    NodeField("-S allocnodes", "ALLOCNODES", of_partition=lambda one: "all"),
    NodeField("-t statecompact", "STATE", of_node=lambda node: SHORT_STATES[node.state]),
    NodeField("-T statelong", "STATE", of_node=lambda node: node.state),
    NodeField("-u user", "USER", of_node=lambda node: node.json["drained_by"] or "Unknown"),
    NodeField("-U userlong", "USER", of_node=lambda node: _with_uid(node.json["drained_by"])),
    NodeField("-v version", "VERSION", lambda row: "22.05.8"),
    NodeField("-V cluster", "CLUSTER", of_node=lambda node: node.cluster),
    NodeField("-w weight", "WEIGHT", lambda row: "1", is_exact=True),
    NodeField("-X sockets", "SOCKETS", _sockets, is_exact=True),
    NodeField("-Y cores", "CORES", lambda row: "1"),
    NodeField("-z socketcorethread", "S:C:T", lambda row: f"{_sockets(row)}:1:1", is_exact=True),
    NodeField("-Z threads", "THREADS", lambda row: "1"),
    NodeField("allocmem", "ALLOCMEM", _least(lambda node: node.mem_alloc_mib), is_exact=True),
    NodeField("comment", "COMMENT", lambda row: NULL),
    NodeField("extra", "EXTRA", lambda row: NULL),
    NodeField("gresused", "GRES_USED", of_node=lambda node: node.gres_used),
    NodeField("port", "PORT", lambda row: "0"),
    NodeField("statecomplete", "STATE", of_node=lambda node: node.long_state.lower()),
)
LETTERS = {field.letter: field for field in FIELDS if field.letter}
"""Fields of --format and --sort."""
NAMES = {name: field for field in FIELDS for name in field.names}
"""Fields of --Format."""
_NUMBERS = frozenset("cdemwODXYZ")


def _with_uid(name: str | None) -> str:
    """`root(0)`."""
    if name is None:
        return "Unknown"
    import pwd  # rarely used

    try:
        return f"{printable(name)}({pwd.getpwnam(name).pw_uid})"
    except KeyError:
        return printable(name)


def _limit(seconds: float | None, none: str = "infinite") -> str:
    return none if seconds is None else short_duration(seconds)


def main() -> int:
    return run(COMMAND, body)


def body(options: Parsed) -> int:
    if options.operands:
        raise COMMAND.refuse(f"unexpected argument '{printable(options.operands[0])}'")
    states = _states(options)
    every_s = _period(options)
    with connect() as client:
        if (clusters := options.get("clusters") or os.environ.get("SLURM_CLUSTERS", "")) != "":
            cluster_suffix(COMMAND, client, clusters)
        while True:
            if every_s is not None or _is_long(options):
                sys.stdout.write(time.strftime("%a %b %d %H:%M:%S %Y\n"))
            sys.stdout.write(_text(client, options, states))
            if every_s is None:
                return 0
            sys.stdout.write("\n")
            sys.stdout.flush()
            try:
                time.sleep(every_s)
            except KeyboardInterrupt:
                return 0


def _is_long(options: Parsed) -> bool:
    """Whether the date comes first."""
    is_own = any(options.has(name) for name in ("format", "Format", "noheader", "summarize", "reservation", "json"))
    return options.has("long") and not is_own


def _period(options: Parsed) -> float | None:
    if not options.has("iterate"):
        return None
    text = options.get("iterate")
    if not (is_digits(text) and int(text[:9]) > 0):
        raise COMMAND.error(f"Invalid option value: --iterate={printable(text)}")
    return float(text[:9])


def _text(client: DaemonConnection, options: Parsed, states: frozenset[str] | None) -> str:
    if options.has("reservation"):
        return _reservations(client, header=not options.has("noheader"))
    nodes, partitions = read_cluster(client.call("GET", "/v1/cluster"))
    wanted = comma_list([*options.all("partition")] or [os.environ.get("SINFO_PARTITION", "")])
    is_wanted = _node_filter(options, states)
    if options.has("json"):
        from gpusched.addons.slurm.documents import nodes_document

        return nodes_document([node for node in nodes if is_wanted(node)], partitions)
    if wanted:
        partitions = [one for one in partitions if one.name in wanted]
    pieces = _pieces(options, nodes, partitions)
    rows = _rows(options, pieces, partitions, is_wanted, is_filtered=states is not None or options.has("nodes"))
    _sort(rows, options.get("sort") or os.environ.get("SINFO_SORT", ""))
    return render(pieces, rows, header=not options.has("noheader"))


# --- which nodes ----------------------------------------------------------------------------------

_STATES = {
    "all": frozenset(SHORT_STATES),
    "alloc": frozenset({"allocated"}),
    "allocated": frozenset({"allocated"}),
    "down": frozenset({"down"}),
    "drain": frozenset({"draining", "drained"}),
    "drained": frozenset({"drained"}),
    "draining": frozenset({"draining"}),
    "drng": frozenset({"draining"}),
    "idle": frozenset({"idle"}),
    "maint": frozenset({"maint"}),
    "mix": frozenset({"mixed"}),
    "mixed": frozenset({"mixed"}),
    "reserved": frozenset({"reserved", "maint"}),
    "resv": frozenset({"reserved", "maint"}),
}
_STATES_OF_OTHERS = (
    "blocked cloud comp completing fail failing failg future inval no_respond perfctrs planned power_down power_up "
    "powered_down powering_down powering_up reboot reboot_issued reboot_requested unk unknown"
).split()
"""Slurm's states that our nodes are never in."""
_SHOWN_STATES = (
    "unknown,down,idle,allocated,?,mixed,future,drain,drained,draining,no_respond,reserved,perfctrs,cloud,completing,"
    "powering_down,powered_down,power_down,powering_up,fail,maint,reboot,reboot^,unknown"
)


def _states(options: Parsed) -> frozenset[str] | None:
    """The states of --states; None for all. Raises: CommandError."""
    given = comma_list(options.all("states"))
    if not options.has("states"):
        return None
    found: set[str] = set()
    for word in given:
        name = word.lower()
        if name in _STATES_OF_OTHERS:
            continue
        if name not in _STATES:
            raise COMMAND.error(f'Bad state string: "{printable(word)}"\nvalid states: {_SHOWN_STATES}')
        found |= _STATES[name]
    if not given:
        raise COMMAND.error(f'Bad state string: ""\nvalid states: {_SHOWN_STATES}')
    return frozenset(found)


def _node_filter(options: Parsed, states: frozenset[str] | None) -> Callable[[Node], bool]:
    names: set[str] | None = None
    if options.has("nodes"):
        try:
            names = set(expand(options.get("nodes")))
        except ValueError:
            raise COMMAND.error(f"Invalid node name specified: {printable(options.get('nodes'))}") from None
    only_dead, only_alive = options.has("dead"), options.has("responding")
    only_reasons = options.has("list-reasons")

    def is_wanted(node: Node) -> bool:
        return (
            (states is None or node.state in states)
            and (names is None or node.name in names)
            and not (only_dead and not only_alive and not node.is_down)
            and not (only_alive and not only_dead and node.is_down)
            and not (only_reasons and node.reason is None)
        )

    return is_wanted


# --- rows -----------------------------------------------------------------------------------------


def _pieces(options: Parsed, nodes: Sequence[Node], partitions: Sequence[Partition]) -> list[Piece]:
    """The columns asked for. Raises: CommandError."""
    if options.has("Format"):
        pieces, unknown = long_pieces(options.get("Format"), NAMES)
        if unknown:
            raise COMMAND.error(f"Invalid node format specification: {printable(unknown[0])}")
        return pieces
    form = options.get("format") if options.has("format") else ""
    if not options.has("format"):
        form = _standard(options, nodes, partitions)
    if form.strip().lower() in ("%all", "all"):
        form = "|".join(f"%{letter}" for letter in LETTERS)
    try:
        return percent_pieces(form, LETTERS)
    except ValueError as error:
        raise COMMAND.error(f"Invalid node format specification: {printable(str(error))}") from None


def _standard(options: Parsed, nodes: Sequence[Node], partitions: Sequence[Partition]) -> str:
    is_long = options.has("long")
    if options.has("summarize"):
        return _SUMMARY
    if options.has("list-reasons"):
        return _REASONS_LONG if is_long else _REASONS
    if options.has("Node"):
        name = max([9, *(len(node.name) for node in nodes)])
        part = max([9, *(len(one.starred) for one in partitions)])
        rest = "%.11T %4c %.8z %.6m %.8d %.6w %.8f %20E" if is_long else "%6t"
        return f"%{name}N %.6D %.{part}P {rest}"
    if is_long:
        return _LONG
    return os.environ.get("SINFO_FORMAT") or _DEFAULT


def _rows(
    options: Parsed,
    pieces: Sequence[Piece],
    partitions: Sequence[Partition],
    is_wanted: Callable[[Node], bool],
    *,
    is_filtered: bool,
) -> list[NodeRow]:
    """Nodes grouped by what the columns show; with --Node each by itself, in each of its partitions."""
    fields = [piece.field for piece in pieces if isinstance(piece.field, NodeField)]
    by_node = [field.of_node for field in fields if field.of_node is not None]
    by_partition = [field.of_partition for field in fields if field.of_partition is not None]
    exact = [field.cell for field in fields if field.is_exact] if options.has("exact") else []
    groups: dict[object, NodeRow] = {}
    for place, partition in enumerate(partitions):
        shown = [node for node in partition.nodes if is_wanted(node)]
        name = tuple(of(partition) for of in by_partition)
        if not shown and by_partition and not options.has("Node") and not options.has("list-reasons"):
            # A partition without such nodes has a row without nodes.
            groups[name, "none"] = NodeRow(partition, [])
        for node in shown:
            alone = NodeRow(partition, [node])
            key: object = (place, node.name)
            if not options.has("Node"):
                key = (name, tuple(of(node) for of in by_node), tuple(cell(alone) for cell in exact))
            row = groups.setdefault(key, alone)
            if node not in row.nodes:
                row.nodes.append(node)
    rows = list(groups.values())
    if options.has("Node"):
        rows.sort(key=lambda row: row.nodes[0].name)
    return rows


def _sort(rows: list[NodeRow], text: str) -> None:
    """Sort by letters such as `-t,N`, the first the most important. Raises: CommandError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in reversed(words):
        letter = word.lstrip("+-#")
        field = LETTERS.get(letter)
        if field is None:
            raise COMMAND.error(f"Invalid sort specification: {printable(word)}")
        if letter == "P" and "#" in word:
            continue  # they are in the order of the config file
        is_number = letter in _NUMBERS

        def key(
            row: NodeRow, cell: Callable[[NodeRow], str] = field.cell, is_number: bool = is_number
        ) -> tuple[float, str]:
            found = cell(row)
            digits = found.rstrip("+")
            return (float(digits), "") if is_number and digits.replace(".", "", 1).isdigit() else (0.0, found)

        rows.sort(key=key, reverse="-" in word)


def _reservations(client: DaemonConnection, header: bool) -> str:
    found = client.call("GET", "/v1/reservations")["reservations"]
    if not found:
        return "No reservations in the system\n"
    width = max([9, *(len(printable(one["name"])) for one in found)])
    lines = [_reservation_line(width, "RESV_NAME", "STATE", "START_TIME", "END_TIME", "DURATION", "NODELIST")] * header
    for one in found:
        window: dict[str, Any] = one["next"]
        lines.append(
            _reservation_line(
                width,
                printable(one["name"]),
                "ACTIVE" if one["is_active"] else "INACTIVE",
                instant(window["start_at"]),
                instant(window["end_at"]),
                long_duration(window["end_at"] - window["start_at"]),
                fold(_each_once(place["node"] for place in one["held"])),
            )
        )
    return "".join(lines)


def _reservation_line(width: int, name: str, state: str, start: str, end: str, duration: str, nodes: str) -> str:
    return f"{name:<{width}}  {state:>8}  {start:>19}  {end:>19}  {duration:>11}  {nodes}\n"


def _each_once(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
