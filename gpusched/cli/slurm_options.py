"""Options of sbatch, srun and salloc without a counterpart here: accepted with a note, or refused with what to use.

Slurm's other options are options of gsub, see `cli.job_options`. gsub uses these for `#SBATCH` lines, and Slurm's own
commands for their command lines: `rows()` are rows of `addons.slurm.command.Command`, `ONLY_SLURM` says what to print.
"""

from __future__ import annotations

from gpusched.model.option import Option, OptionNote, Several, one_gpus, without_effect
from gpusched.model.units import is_digits, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from gpusched.model.option import Reader

NOTES = "slurm_notes"
"""Key of the sentences on options without effect among the values of a command line."""
PER_SOCKET, SOCKETS_PER_NODE = "slurm_gpus_per_socket", "slurm_sockets_per_node"
"""Keys of what both together say, the GPUs of a node: see `gpus_of_sockets`."""
NEEDS_SOCKETS = "it needs --sockets-per-node, as in Slurm; or give the GPUs of a node: --gpus-per-node"
NO_MAIL = without_effect("--mail-user", "no --mail-type says when to send mail")


class OnlySlurm:
    """An option: how it is typed, whether it is refused, and why."""

    __slots__ = ("is_refused", "option", "row", "why")

    def __init__(self, row: str, why: str, *, is_refused: bool) -> None:
        """Args: row: names and value, as in `-m --distribution ARG`; `[ARG]` is an optional value after `=`."""
        self.row = row
        self.option = Option(row)
        self.is_refused = is_refused
        self.why = why

    @property
    def note(self) -> OptionNote:
        """`--hint has no effect: ...`, or `--uid is not supported: ...`."""
        name = self.option.long
        if self.is_refused:
            return OptionNote.of(name, f"{name} is not supported: {self.why}", self.why)
        return without_effect(name, self.why)


_CORES = "cores are booked by count; the kernel chooses which ones"
SOCKETS = "sockets are not distinguished; a number of them only multiplies --gpus-per-socket"
_ONE_NETWORK = "there is no cluster network to choose"

_IGNORED = {
    # where tasks run on a node
    "--hint ARG": _CORES,
    "--threads-per-core ARG": _CORES,
    "--cores-per-socket ARG": _CORES,
    "--ntasks-per-core ARG": _CORES,
    "--ntasks-per-socket ARG": _CORES,
    "-m --distribution ARG": "it orders the tasks of a step; give it to srun",
    "--cpu-bind ARG": _CORES,
    "--mem-bind ARG": "the kernel places memory",
    "--gpu-bind ARG": "tasks see all GPUs of the job, or only their own with --gpus-per-task",
    "--gres-flags ARG": _CORES,
    "-O --overcommit": "tasks may always share the cores of their job",
    "-s --oversubscribe": "a job has what it books to itself; the rest of the node is always shared",
    "--contiguous": _ONE_NETWORK,
    "--switches ARG": _ONE_NETWORK,
    "--network ARG": _ONE_NETWORK,
    "--spread-job": "the configured placement strategy chooses the nodes",
    "--use-min-nodes": "a range of nodes always gets the fewest that have room when the job starts",
    # of the nodes and their daemons
    "-k --no-kill [ARG]": "a job ends when one of its nodes fails",
    "--wait-all-nodes ARG": "a job always starts on all of its nodes together",
    "--delay-boot ARG": "nodes are not booted for jobs",
    "--power ARG": "power is not managed",
    "--cpu-freq ARG": "frequencies of cores are not managed",
    "--gpu-freq ARG": "frequencies of GPUs are not managed",
    "--profile ARG": "the usage of every job is recorded; see ghist --efficiency",
    "--acctg-freq ARG": "the usage of every job is recorded; see ghist --efficiency",
    "--tmp ARG": "temporary disk space is not tracked; run df -h /tmp in the job",
    "--propagate [ARG]": "limits come from [isolation] and from the user's account",
    "--get-user-env [ARG]": "the job gets the environment of its submission, or a minimal one with --export=NONE",
    "--ignore-pbs": "#PBS lines are always comments",
    "--priority ARG": "priorities are computed; lower yours with --nice, or ask an administrator for a QOS",
    "--mcs-label ARG": "there are no security labels",
    "--time-min ARG": "the time limit is never lowered; see -t auto",
    "--bcast [ARG]": "programs are not copied to nodes",
    "--compress [ARG]": "programs are not copied to nodes",
    "--thread-spec ARG": "no threads are reserved for the system",
    "-S --core-spec ARG": "no cores are reserved for the system",
}
_REFUSED = {
    "--uid ARG": "a job runs as the user who submits it; run the command as that user",
    "--gid ARG": "a job runs with the groups of its user; see newgrp(1)",
    "-F --nodefile ARG": "list the nodes with -w",
    "--batch ARG": "request features with --constraint",
    "--bb ARG": "there are no burst buffers; copy the data in the script",
    "--bbf ARG": "there are no burst buffers; copy the data in the script",
    "--cluster-constraint ARG": "there is one cluster; use --constraint",
    "--reboot": "nodes are not rebooted for jobs",
    "--container ARG": "start the container in the script: apptainer exec IMAGE COMMAND",
    "--het-group ARG": "heterogeneous jobs are not supported; submit one job for each component",
    "--export-file ARG": "list the variables with --export",
}

ONLY_SLURM: dict[str, OnlySlurm] = {
    one.option.long.removeprefix("--"): one
    for fates, is_refused in ((_IGNORED, False), (_REFUSED, True))
    for one in [OnlySlurm(row, why, is_refused=is_refused) for row, why in fates.items()]
}
"""By long name without dashes."""


def ignored_lines(of_script: Sequence[OptionNote], path: str, others: Sequence[OptionNote]) -> list[str]:
    """What is printed after a submission on options without effect: one line for a script's, see `gsub --explain`.

    Args: of_script: the notes on them; path: its file, empty for standard input; others: printed one by one.
    """
    lines: list[str] = list(of_script)
    if len(of_script) > 1:
        import shlex  # few scripts have such options

        where = f"gsub --explain {shlex.quote(path)}" if path else ", ".join(note.option for note in of_script)
        lines = [f"{len(of_script)} options have no effect here: {printable(where)}"]
    return [*lines, *(text for text in others if text not in lines)]


def rows(without: Collection[str] = ()) -> str:
    """The options as rows of a command, one a line; those with these long names are left out."""
    return "\n".join(f"{one.row}  {one.note}" for name, one in ONLY_SLURM.items() if name not in without)


_ONE_CLUSTER = OnlySlurm("-M --clusters ARG", "there is one cluster", is_refused=False)
"""Of gsub alone: Slurm's commands compare the name."""


def parsed_options(taken: Collection[str]) -> Iterator[Option]:
    """The options for the parser of gsub, without the spellings that gsub uses for something else."""
    yield Option("-b VALUE  as --begin", "", key="begin_at")
    yield Option("-Q  as --quiet", "", key="quiet")
    yield Option(
        "--gpus-per-socket VALUE  with --sockets-per-node, as --gpus-per-node", "", _per_socket, key=PER_SOCKET
    )
    yield Option(f"-B --sockets-per-node --extra-node-info VALUE  {SOCKETS}", "", _sockets, key=SOCKETS_PER_NODE)
    for one in (*ONLY_SLURM.values(), _ONE_CLUSTER):
        names = [name for name in one.option.names if name not in taken]
        has_value = one.option.needs_value
        yield Option(
            f"{' '.join(names)}{' VALUE' if has_value else ''}  {one.note}",
            "",
            _reader(one),
            key=NOTES,
            sets=None if has_value else {},
        )


def _per_socket(text: str) -> Several:
    found = one_gpus(text)
    if not found["gpus"]:
        raise ValueError("it must be a number of GPUs: 1, a100:1")
    return Several({PER_SOCKET: found["gpus"]}, **({"gpu_type": found["gpu_type"]} if found["gpu_type"] else {}))


def _sockets(text: str) -> Several:
    return Several({SOCKETS_PER_NODE: count_of_sockets(text)})


def count_of_sockets(text: str) -> int:
    """Sockets in `2`, `1-2`, or `2:8:1` of --extra-node-info. Raises: ValueError."""
    count = text.partition(":")[0].partition("-")[0]
    if not (is_digits(count) and 0 < int(count[:4]) <= 64 and len(count) < 4):
        raise ValueError("it must be a number of sockets")
    return int(count)


def gpus_of_sockets(per_socket: int | None, sockets: int | None) -> int | None:
    """GPUs of each node; None without a number for each socket. Raises: ValueError without a number of sockets."""
    if per_socket is None:
        return None
    if sockets is None:
        raise ValueError(NEEDS_SOCKETS)
    return per_socket * sockets


def _reader(one: OnlySlurm) -> Reader:
    def read(text: str) -> Several:
        if one.is_refused:
            raise ValueError(f"it is not supported: {one.why}")
        return Several({NOTES: [one.note]})

    return read
