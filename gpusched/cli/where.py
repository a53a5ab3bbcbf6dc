"""The options of gsub that say on which nodes, beside which others, and on what terms a job runs."""

from __future__ import annotations

from gpusched.cli.parse import Option, text, whole
from gpusched.cli.readers import gpus, instant
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpusched.cli.parse import Reader, Values

GPU_KEYS = frozenset({"gpus", "gpus_per_node", "gpu_fraction", "gpu_type"})
"""One wish in several values: whoever says any of them anew takes back the others said before."""

_MOST = 1_000_000


def gpus_of_node(value: str) -> Values:
    """As -g, but on each node: `2`, `a100:2`, `0.5`."""
    found = gpus(value)
    count = 1 if found["gpu_fraction"] is not None else found["gpus"]
    kind: Values = {"gpu_type": found["gpu_type"]} if found["gpu_type"] else {}
    return {"gpus_per_node": count, "gpu_fraction": found["gpu_fraction"], **kind}


def gres(value: str) -> Values:
    """Slurm's `gpu:2` and `gpu:a100:2`, on each node."""
    name, _, rest = value.partition(":")
    if name != "gpu":
        raise ValueError(
            f"{printable(value, 40)!r} is no GPU, as in gpu:2 or gpu:a100:2; other resources are asked for with --res"
        )
    return gpus_of_node(rest or "1")


def nodes(value: str) -> Values:
    """A number of nodes; Slurm's range only when both ends are the same."""
    low, dash, high = value.partition("-")
    if dash and low and high and low != high:
        raise ValueError(f"{printable(value, 40)!r} is a range, which is not supported; write -N {printable(low, 10)}")
    return whole("nodes", 1, 4096)(low if dash and low == high else value)


def hosts(key: str) -> Reader:
    """Slurm's list of nodes, `lab1,gpu[01-03]`."""

    def read(value: str) -> Values:
        from gpusched.model.hostlist import expand  # few submissions name nodes

        # A tuple: of several uses the last one counts, as in Slurm.
        return {key: tuple(expand(value))}

    return read


def counts(key: str, example: str) -> Reader:
    """`name:2,other` or `name=2`, several uses add up."""

    def read(value: str) -> Values:
        found: dict[str, int] = {}
        for word in value.split(","):
            name, mark, number = word.partition("=" if "=" in word else ":")
            if not name.strip() or (mark and not number):
                raise ValueError(f"{printable(value, 40)!r} is not NAME or NAME=N; write {example}")
            found[name.strip()] = whole("n", 1, _MOST)(number)["n"] if mark else 1
        return {key: found}

    return read


def where_options(res: str, when: str) -> list[Option]:
    """The options, in the sections that are named so."""
    where = "Where"
    return [
        Option(
            "--gpus-linked",
            sets={"gpus_linked": True},
            section=res,
            help="only cards that are linked with each other (NVLink), or else next to the same memory",
        ),
        Option(
            "--res",
            metavar="NAME=N",
            read=counts("resources", "scratch=2"),
            section=res,
            help="so much of a resource that nodes have by [node] resources in the config; may be repeated",
        ),
        Option(
            "-L",
            "--licenses",
            metavar="LIST",
            read=counts("licenses", "matlab:2,ansys"),
            section=res,
            help="licenses of [license] in the config: matlab:2,ansys",
        ),
        Option(
            "-N",
            "--nodes",
            metavar="N",
            read=nodes,
            section=where,
            help="so many nodes at once; -g counts the GPUs of all together, -c and -m are of each; default 1",
        ),
        Option(
            "--gpus-per-node",
            metavar="N",
            read=gpus_of_node,
            section=where,
            help="GPUs of each node, in place of -g; with -g and without -N it says how many nodes there are",
        ),
        Option(
            "-w",
            "--nodelist",
            metavar="NODES",
            read=hosts("nodelist"),
            section=where,
            help="only these nodes: lab1,gpu[01-03]",
        ),
        Option("-x", "--exclude", metavar="NODES", read=hosts("exclude"), section=where, help="none of these nodes"),
        Option(
            "-C",
            "--constraint",
            metavar="LABELS",
            read=text("constraint"),
            section=where,
            help="only nodes with these labels of [node] labels: 'nvlink&!old|h100', where & binds tighter than |",
        ),
        Option(
            "--prefer",
            metavar="LABELS",
            read=text("prefer"),
            section=where,
            help="rather nodes with these labels; others will do",
        ),
        Option("--exclusive", sets={"exclusive": True}, section=where, help="no other job on the same nodes"),
        Option(
            "--qos",
            metavar="NAME",
            read=text("qos"),
            section=when,
            help="quality of service; default: [default] qos of the config, else none",
        ),
        Option(
            "--reservation",
            metavar="NAME",
            read=text("reservation"),
            section=when,
            help="inside this reservation only; list them with: gctl reserve",
        ),
        Option(
            "--deadline",
            metavar="WHEN",
            read=instant("deadline_at"),
            section=when,
            help="to have ended by then, as --begin; one that no longer can is ended as DEADLINE",
        ),
    ]
