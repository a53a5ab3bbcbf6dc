"""How a run of a job is started, and the signal that precedes its end."""

from __future__ import annotations

from gpusched.model.option import (
    BOX,
    FAIL,
    FILES,
    LAYOUT,
    MAX_LIST,
    MAX_OWN,
    RES,
    SLURM,
    WHAT,
    Option,
    field,
    log_max,
    notice,
)
from gpusched.model.units import MAX_MIB

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import ClassVar

    from gpusched.model.value import Value
else:
    Value = object


class Notice(Value):
    """A signal sent before the time limit, or as the first signal of an earlier stop (`--signal [B:]SIG[@s]`)."""

    signal: int
    before_s: int
    main_only: bool
    """True for `B:`: only the job's first process gets it, not the whole tree."""


class Launch(Value):
    """How a run is started. Texts may hold lone surrogates for bytes that are not UTF-8."""

    _section = FILES

    argv: tuple[str, ...] = field(
        "strings", "Command and arguments; with a script its arguments only.", most=MAX_OWN, keyword=None
    )
    script_sha: str | None = field(
        "string", "Text of the script, beginning with #!.", name="script", most=MAX_OWN, keyword=None
    )
    """SHA-256 of the script's text in the payload table; None for a plain command."""
    script_name: str | None = field("string", "Name of the script.", keyword=None)
    """Name of the script as submitted: file name, `stdin` or `wrap`."""
    env_sha: str = field("map", "Captured environment.", name="env", most=MAX_OWN, keyword=None)
    """SHA-256 of the captured environment in the payload table."""
    env_named: ClassVar[tuple[str, ...]] = field(
        "strings", "Variables of env that [submit] env_exclude does not leave out.", most=MAX_OWN, keyword=None
    )
    work_dir: str = field(
        "string",
        "Working directory, absolute.",
        option="-D --chdir DIR  working directory; default: the current one",
        section=WHAT,
        completes="dir",
        keyword="chdir",
        python="str | os.PathLike[str]",
    )
    venv: str | None = field(
        "string",
        "Folder of a virtual environment to activate, absolute.",
        option=("--venv DIR  activate this virtual environment for the job, in place of one that is active here"),
        section=WHAT,
        completes="dir",
        default=None,
        python="str | os.PathLike[str]",
    )
    conda: str | None = field(
        "string",
        "Folder of a conda environment to activate, absolute.",
        option="--conda ENV  as --venv, a conda environment by name or folder",
        section=WHAT,
        default=None,
        python="str | os.PathLike[str]",
    )
    umask: int = field("integer", "File mode mask of the submitter.", (0, 0o777), default=0o022, keyword=None)
    stdout: str | None = field(
        "string",
        "Output pattern.",
        option=(
            "-o --output FILE  output file, whose folder is created if missing; %j id, %A_%a array and task, %x "
            "name, %u user, %N node, %5j padded; default gpusched-%j.out, for tasks gpusched-%A_%a.out"
        ),
        completes="file",
        default=None,
        keyword="output",
        python="str | os.PathLike[str]",
    )
    """Output pattern (`%j %A %a %x %u %N`); None means `gpusched-%j.out`."""
    stderr: str | None = field(
        "string",
        "Error pattern; absent: into the output.",
        option="-e --error FILE  error output; default: same file as the output",
        completes="file",
        default=None,
        keyword="error",
        python="str | os.PathLike[str]",
    )
    stdin: str | None = field(
        "string",
        "Input pattern; absent: no input.",
        option="-i --input FILE  standard input, with the patterns of the output; default: /dev/null",
        completes="file",
        default=None,
        keyword="input",
        python="str | os.PathLike[str]",
        is_shared=False,
    )
    """Input pattern; None for /dev/null."""
    open_mode: str | None = field(
        "string",
        "What to do with a file that exists.",
        option="--open-mode MODE  append or truncate, for all runs; default: each retry gets its own file",
        choices=("append", "truncate"),
        default=None,
    )
    """`truncate`, `append`, or None: the first run truncates, later runs get a numbered suffix."""
    prolog: str | None = field(
        "string",
        "Program to execute before the command, in the run; absolute or relative to work_dir.",
        option=(
            "--prolog FILE  program to execute in the run before the command, within the time limit; if it fails, so "
            "does the run"
        ),
        completes="file",
        default=None,
        python="str | os.PathLike[str]",
        is_shared=False,
        background_only="prolog of its own",
    )
    epilog: str | None = field(
        "string",
        "Program to execute after the command, however that ended; absolute or relative to work_dir.",
        option=(
            "--epilog FILE  program to execute in the run after the command, also after failure, cancel and time "
            "limit; GPUSCHED_STATE and GPUSCHED_EXIT_CODE say how it ended"
        ),
        completes="file",
        default=None,
        python="str | os.PathLike[str]",
        is_shared=False,
        background_only="epilog of its own",
    )
    notice: Notice | None = field(
        "notice",
        "Signal some time before the time limit, or first when the job is stopped before.",
        option=(
            "--signal [B:]SIG[@S]  send this signal S seconds (default 60) before the time limit, and in place of "
            "TERM when the job is preempted, requeued or cancelled earlier; B: to the first process only"
        ),
        read=notice,
        section=FAIL,
        default=None,
        python="Mapping[str, Any]",
    )
    stop_signal: int | None = field(
        "integer",
        "First signal when the job is stopped; unless set TERM, before the time limit that of `notice`.",
        (1, 64),
        default=None,
    )
    """None: the signal of `notice`, unless already sent or at the time limit; else TERM."""
    grace_s: float | None = field(
        "number",
        "Between the first signal and KILL, in seconds.",
        (0, 86400),
        "--grace TIME  between the first signal and KILL when the job is stopped; default 30s",
        section=FAIL,
        default=None,
    )
    """Time between the first signal and KILL; None for the setting `grace_s`."""
    gpu_ids: str | None = field(
        "string",
        "Form of CUDA_VISIBLE_DEVICES.",
        option="--gpu-ids FORM  form of CUDA_VISIBLE_DEVICES: index (default) or uuid",
        section=RES,
        choices=("index", "uuid"),
        default=None,
    )
    """`index` or `uuid` in CUDA_VISIBLE_DEVICES; None for the setting `gpu_ids`."""
    slurm: bool = field(
        "boolean",
        "Submitted with a command of Slurm: notices go to its steps alone, and its log speaks like Slurm's.",
        default=False,
        keyword=None,
    )
    only_holds: bool = field(
        "boolean",
        "The job only holds its resources, for steps and commands from outside, as that of `salloc --no-shell`.",
        default=False,
        keyword=None,
    )
    ranks: bool = field(
        "boolean",
        "Start each task that is asked for as a rank, a separate process; otherwise srun in the job starts them.",
        option="--ranks  start each task as a separate process (default, unless a script has #SBATCH lines)",
        section=LAYOUT,
        also=(
            Option(
                "--no-ranks  start the program once on each node; srun in it starts the tasks",
                LAYOUT,
                sets={"ranks": False},
                is_shared=False,
            ),
        ),
        default=False,
        is_shared=False,
    )
    """Whether the engine starts the tasks; see `model.layout.starts_ranks`."""
    submit_dir: str | None = field(
        "string", "Folder of relative outputs, absolute; the working directory unless it is given.", default=None
    )
    """Base of relative outputs, and the submit directory in the environment; None for `work_dir`."""
    log_max_mib: int | None = field(
        "integer",
        "Rotate an output file when it has grown to this size, in MiB.",
        (1, MAX_MIB),
        (
            "--log-max SIZE[:KEEP]  rotate the output file to FILE.old1 at SIZE, keeping KEEP files; default: no "
            "limit; 3 files"
        ),
        read=log_max,
        default=None,
        is_shared=False,
        background_only="output file that is put aside; [interactive] log_mib limits it",
    )
    """Rotate an output file at this size; None lets it grow."""
    log_keep: int = field(
        "integer", "How many rotated files are kept; 0 empties the file instead.", (0, 100), default=3
    )
    submit_line: str | None = field(
        "string", "Command line of the submission, for accounting.", default=None, keyword=None
    )
    """Command line of the submission, in a form that can be typed."""
    script_path: str | None = field(
        "string", "Where the script was read, absolute; null for text without a file.", default=None, keyword=None
    )
    """Where the submitter's script is, for people and tools that look at it; what runs is the stored text."""
    image: str | None = field(
        "string",
        "Container image to run in: a reference, or a .sif file.",
        option=(
            "--image IMAGE  run in this container image, docker.io/pytorch/pytorch:2.4.0 or a .sif file; it is pulled "
            "before the job takes a GPU, and pinned by its digest"
        ),
        section=BOX,
        also=(Option("--container-image IMAGE  as --image", SLURM),),
        default=None,
    )
    binds: tuple[str, ...] = field(
        "strings",
        "Folders and files of the host in the container, HOST:CONTAINER or HOST:CONTAINER:ro.",
        option=(
            "--bind HOST:CONTAINER[:ro]  with --image: mount a folder or file of the host, besides the working "
            "directory; may be repeated"
        ),
        section=BOX,
        also=(Option("--container-mounts LIST  as --bind", SLURM),),
        most=MAX_LIST,
        default=(),
    )
    container_workdir: str | None = field(
        "string",
        "Working directory inside the container, absolute.",
        option="--container-workdir DIR  with --image: start in this folder of the container; default: that of -D",
        section=BOX,
        default=None,
    )
    image_digest: str | None = None
    """The image that all runs use, by digest; None until it has been pulled. Of a pull, the one that it must find."""
    image_refused: tuple[str, ...] = ()
    """Nodes to which it could not be pulled."""

    @property
    def kept_files(self) -> int:
        """How many rotated files each output file may have."""
        return 0 if self.log_max_mib is None else self.log_keep


SUPERVISED = (
    *("argv", "work_dir", "umask", "prolog", "epilog"),
    *("notice", "stop_signal", "log_max_mib", "log_keep"),
)
"""What a supervisor needs of a `Launch`, by these names among the facts of its ticket."""
