"""sattach: the layout of a running step over its nodes, and what it writes from now on.

Tasks write into srun's own descriptors or files, so what is shown is the file behind them; nothing is taken away from
srun. Output at somebody's terminal or in a pipe is not in any file: a sentence says where it goes.
"""

from __future__ import annotations

import os
import stat
import sys
import time

from gpusched.addons.slurm.command import Command, CommandError, Parsed, parse, run
from gpusched.cli.query import quote
from gpusched.client import connect
from gpusched.errors import GpuschedError, NotFound, NotReady, UsageError
from gpusched.model.units import is_digits, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.client import DaemonConnection

    Json = dict[str, Any]

COMMAND = Command(
    "sattach",
    "sattach [OPTIONS] JOB.STEP",
    """
    --error-filter TASK  errors of one task: the files of a step are shown as they are; refused
    --input-filter TASK  input for one task: only the step's srun can give it; refused
    -l --label  number each line: srun -l does it as the lines are written; refused
    --layout  print the nodes and tasks of the step, and exit
    --output-filter TASK  output of one task: the files of a step are shown as they are; refused
    --pty  the terminal of task 0 is that of its srun; refused
    -Q --quiet  print no notes
    -v --verbose  accepted
    """,
    permutes=True,
    has_h=True,
)
_REFUSED = {
    "error-filter": "the output of a step is shown as it is; give each task a file of its own: srun -o out-%t.txt",
    "input-filter": "only the srun of the step can give it input",
    "label": "lines are numbered as they are written; start the step with: srun -l",
    "output-filter": "the output of a step is shown as it is; give each task a file of its own: srun -o out-%t.txt",
    "pty": "the terminal of a step is that of its srun; start another step with: srun --jobid=JOB --overlap --pty bash",
}
NO_STEP = "Could not get job step info: Invalid job id specified"
LOOK_S = 0.1
"""Between two looks at the files."""
ASK_S = 0.5
"""Between two questions whether the step has ended."""


def main() -> int:
    return run(COMMAND, body)


def body(parsed: Parsed) -> int:
    """Print the layout of a step, or its output until it ends; returns the exit code, then that of the step."""
    for name, why in _REFUSED.items():
        if parsed.has(name):
            raise COMMAND.error(f"--{name} is not supported: {why}")
    if len(parsed.operands) != 1:
        raise COMMAND.error("give one step of a job, such as 42.0; squeue -s lists the steps")
    word, number = _read_step(parsed.operands[0])
    with connect() as client:
        step = _find(client, word, number)
        if step is None or step["end_at"] is not None:
            raise _no_step(word, number, step)
        if parsed.has("layout"):
            sys.stdout.write(_layout(step))
            return 0
        outputs = [_Output(path, sink) for path, sink in _files(client, step, parsed).items()]
        return _follow(client, step, outputs, parsed)


def _read_step(text: str) -> tuple[str, int]:
    """The job and the number of a step. Raises: CommandError."""
    word, dot, number = text.partition(".")
    if not dot:
        raise COMMAND.error("Did not find a period in the step ID string")
    if not all(is_digits(part) for part in word.split("_", 1)):
        raise COMMAND.error(f'"{printable(word, 60)}" does not look like a jobid')
    if number == "batch":
        raise COMMAND.error(f"{printable(text, 60)} is the script of the job; follow its output with: glogs -f {word}")
    if not (is_digits(number) and len(number) < 10):
        raise COMMAND.error(f'"{printable(number, 60)}" does not look like a stepid')
    return word, int(number)


def _find(client: DaemonConnection, word: str, number: int) -> Json | None:
    """The step of the job's last run, also when it has ended; None if there is none."""
    try:
        steps: list[Json] = client.call("GET", f"/v1/steps?ids={quote(word)}")["steps"]
    except NotReady:
        raise
    except (NotFound, UsageError):
        return None
    return next((step for step in steps if step["step"] == number), None)


def _no_step(word: str, number: int, step: Json | None) -> CommandError:
    if step is None:
        return CommandError(
            f"sattach: error: {NO_STEP}\nsattach: job {word} has no step {number}\nsattach: hint: squeue -s"
        )
    found = COMMAND.error("Could not get job step info: Job/step already completing or completed")
    found.text += f"\nsattach: step {step['id']} is {step['state']}\nsattach: hint: sacct -j {step['id']}"
    return found


def _layout(step: Json) -> str:
    lines = ["Job step layout:", f"  {step['tasks']} tasks, {len(step['nodes'])} nodes ({step['nodelist']})", ""]
    for place, part in enumerate(step["parts"]):
        numbers = "".join(f"{task} " for task in part["task_ids"])
        lines.append(f"  Node {place} ({part['node']}), {part['tasks']} task(s): {numbers}")
    return "\n".join(lines) + "\n"


# --- where a step writes --------------------------------------------------------------------------


def _files(client: DaemonConnection, step: Json, parsed: Parsed) -> dict[str, int]:
    """The files that a step writes, each with the descriptor of ours that shows it. Raises: CommandError."""
    if step["pid"] is None:
        raise COMMAND.error("Could not get job step info: Access/permission denied")
    process = _Process(step)
    if not process.is_srun:
        job = step["job"]
        raise CommandError(
            f"sattach: error: step {step['id']} was started on {step['node']}, and only that node knows what it "
            f"writes to\nsattach: hint: srun --jobid={job} -w {step['node']} -N 1 -n 1 --overlap sattach {step['id']}"
        )
    files: dict[str, int] = {}
    output = process.option("output", "SLURM_STDOUTMODE")
    error = process.option("error", "SLURM_STDERRMODE") or output
    for text, ours in ((output, 1), (error, 2)):
        if text is None or text == "all" or text.isdigit():
            process.add_stream(files, ours)
        elif text != "none":
            for path in process.paths(client, text):
                files.setdefault(path, ours)
    if not files:
        where = process.told or "nowhere: it is discarded"
        raise COMMAND.error(f"the output of step {step['id']} is not in a file; it goes {where}")
    missing = [path for path in files if not os.path.exists(path)]
    if missing and not parsed.has("quiet"):
        COMMAND.note(f"{', '.join(map(printable, missing))}: not here, perhaps on another node of the step")
    return files


class _Process:
    """The srun of a step, as far as the kernel shows it here."""

    def __init__(self, step: Json) -> None:
        self._step = step
        self._folder = f"/proc/{step['pid']}"
        self.told = ""
        """Where output goes that is in no file."""
        words = [os.fsdecode(word) for word in self._read("cmdline").split(b"\0")[:-1]]
        entries = [entry.partition("=") for entry in os.fsdecode(self._read("environ")).split("\0")]
        self._variables = {name: value for name, _, value in entries}
        # By its path, or by the text that an interpreter was given.
        begins = [place for place, word in enumerate(words) if os.path.basename(word) == "srun"][:1]
        begins = begins or [words.index("-c") + 1 if "-c" in words else len(words)]
        self._argv = words[begins[0] + 1 :]
        is_of_job = self._variables.get("SLURM_JOB_ID", str(step["job_id"])) == str(step["job_id"])
        self.is_srun = bool(self._argv) and is_of_job

    def _read(self, name: str) -> bytes:
        try:
            with open(f"{self._folder}/{name}", "rb") as file:
                return file.read()
        except OSError:
            return b""

    def option(self, name: str, variable: str) -> str | None:
        """An option of this srun. Raises: CommandError."""
        from gpusched.addons.slurm.srun import COMMAND as SRUN

        return parse(SRUN, self._argv).get(name) or self._variables.get(variable)

    def add_stream(self, files: dict[str, int], number: int) -> None:
        """Add the file behind its standard output or errors, if it is one."""
        path = f"{self._folder}/fd/{number}"
        try:
            mode, target = os.stat(path).st_mode, os.readlink(path)
        except OSError:
            return
        node = self._step["node"]
        if stat.S_ISREG(mode):
            files.setdefault(target, number)
        elif target.startswith(("/dev/pts/", "/dev/tty")):
            self.told = f"to the terminal {target} on {node}, where srun was typed"
        elif target != os.devnull:
            self.told = f"to the program behind srun on {node}, through a pipe or socket"

    def paths(self, client: DaemonConnection, pattern: str) -> list[str]:
        """The files of a pattern, each once."""
        from gpusched.addons.slurm.streams import expand

        step = self._step
        job = client.call("GET", f"/v1/jobs/{quote(step['job'])}")["job"]
        values: dict[str, str | int] = {
            "A": int(job["array_id"] or job["job_id"]),
            "a": int(job["task"] or 0),
            "j": int(job["job_id"]),
            "J": f"{job['job_id']}.{step['step']}",
            "s": int(step["step"]),
            "u": str(job["user"]),
            "x": str(job["name"]),
        }
        try:
            folder = os.readlink(f"{self._folder}/cwd")
        except OSError:
            folder = "/"
        found = []
        for place, part in enumerate(step["parts"]):
            for task in part["task_ids"]:
                here = {**values, "t": int(task), "n": place, "N": str(part["node"]).partition(".")[0]}
                found.append(os.path.join(folder, expand(pattern, here)))
        return list(dict.fromkeys(found))


# --- following ------------------------------------------------------------------------------------


class _Output:
    """A file of the step, from its present end on."""

    def __init__(self, path: str, sink: int) -> None:
        from gpusched.tail import Tail  # --layout needs none

        self._stream = sys.stdout.buffer if sink == 1 else sys.stderr.buffer
        self._tail = Tail(path)
        self._tail.begin_last(0)

    def copy(self) -> int:
        """Print what is new; returns its size."""
        copied = self._tail.copy(self._write)
        if copied:
            self._stream.flush()
        return copied

    def _write(self, piece: bytes) -> None:
        self._stream.write(piece)


def _follow(client: DaemonConnection, step: Json, outputs: list[_Output], parsed: Parsed) -> int:
    """Print the output until the step has ended; returns its exit code."""
    from gpusched.cli.gwait import patiently

    ask_at = time.monotonic()
    while True:
        # What was written before the end was recorded is read after it.
        if time.monotonic() >= ask_at:
            ask_at = time.monotonic() + ASK_S
            try:
                now = patiently(lambda: _find(client, str(step["job"]), int(step["step"])))
            except GpuschedError as error:
                raise COMMAND.error(printable(error.message, 400)) from None
            if now is None or now["run"] != step["run"] or now["end_at"] is not None:
                for one in outputs:
                    one.copy()
                return _exit_code(step, now, parsed)
        if not sum(one.copy() for one in outputs):
            time.sleep(LOOK_S)


def _exit_code(step: Json, now: Json | None, parsed: Parsed) -> int:
    if now is None or now["run"] != step["run"]:
        raise COMMAND.error(
            f"job {step['job']} runs again; the end of step {step['id']} is in: sacct -D -j {step['job']}"
        )
    if now["state"] != "COMPLETED" and not parsed.has("quiet"):
        COMMAND.note(f"step {now['id']} is {now['state']}")
    if now["signal"] is not None:
        return 128 + int(now["signal"])
    return 1 if now["exit_code"] is None else int(now["exit_code"])
