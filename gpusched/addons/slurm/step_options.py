"""The options of a step: typed, from variables, or those of its job."""

from __future__ import annotations

import os

from gpusched.addons.slurm.spellings import BAD_GRES, options_of, typed_count
from gpusched.model.option import tres_per_task
from gpusched.model.units import is_digits, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from gpusched.addons.slurm.command import Command, CommandError, Parsed

_INPUTS = {
    **options_of(
        "CPU_BIND DISTRIBUTION EXACT HOSTFILE GPU_BIND GPUS_PER_TASK IMMEDIATE NO_KILL NTASKS OPEN_MODE OVERCOMMIT "
        "OVERLAP WAIT"
    ),
    "EXPORT_ENV": "export",
    "KILL_BAD_EXIT": "kill-on-bad-exit",
    "LABELIO": "label",
    "NNODES": "nodes",
    "NPROCS": "ntasks",
    "STDERRMODE": "error",
    "STDINMODE": "input",
    "STDOUTMODE": "output",
    "STEP_GRES": "gres",
    "UNBUFFEREDIO": "unbuffered",
    "WORKING_DIR": "chdir",
}
"""Variables after SLURM_ that set an option of a step; those of the job's own request are not among them."""
_ON_NODES = ("nodes", "nodelist", "exclude", "relative", "distribution", "hostfile")


def with_tres(command: Command, typed: Parsed) -> Parsed:
    """The options with those that --tres-per-task stands for in its place. Raises: CommandError."""
    options: list[tuple[str, str | None]] = []
    for name, text in typed.options:
        if name != "tres-per-task":
            options.append((name, text))
            continue
        try:
            if "|" in (text or ""):
                raise command.error(BAD_GRES)
            found = tres_per_task(text or "")
        except ValueError as error:
            raise command.error(f"--{name}: {error}", 255) from None
        if "cpus" in found:
            options.append(("cpus-per-task", str(int(found["cpus"]))))
        if "gpus_per_task" in found:
            kind = f"{found['gpu_type']}:" if found.get("gpu_type") else ""
            options.append(("gpus-per-task", f"{kind}{found['gpus_per_task']}"))
    return type(typed)(options, typed.operands)


class Options:
    """The options of a step: from the command line, then from variables, then from the job."""

    def __init__(self, command: Command, typed: Parsed, job: Mapping[str, Any]) -> None:
        self._command = command
        self._typed = typed
        self._variables = {
            option: os.environ[f"SLURM_{name}"] for name, option in _INPUTS.items() if os.environ.get(f"SLURM_{name}")
        }
        if "SRUN_CPUS_PER_TASK" in os.environ:
            self._variables["cpus-per-task"] = os.environ["SRUN_CPUS_PER_TASK"]
        if self._variables.get("nodes") == str(len(job["nodes"])):
            # What the job has, as every process in it is told.
            del self._variables["nodes"]
        self.job = job
        self._gpu_types: dict[str, str] = {}
        self.gpus_per_task = self._gpus("gpus-per-task")
        self.gpus = self._gpus("gpus")
        per_node = (self._gpus("gpus-per-node"), self._gres())
        self.gpus_per_node = next((count for count in per_node if count is not None), None)
        self.gpu_type = self._gpu_type()
        self.per_node = self.number("ntasks-per-node", None)
        self.tasks = self._tasks()
        """As asked for; None for what follows from the rest."""
        self.cpus_per_task = self.number("cpus-per-task", None)
        self.wait_s = self.number("wait", 0, least=0)
        self.kills_on_bad_exit = self.flag_value("kill-on-bad-exit")
        self.time_limit_s = self._limit()
        self.is_exact = self.has("exact") or typed.has("exclusive")
        self.has_label = self.has("label")

    def _tasks(self) -> int | None:
        tasks = self.number("ntasks", None, typed_only=True)
        per_gpu = self.number("ntasks-per-gpu", None)
        if tasks is None and per_gpu is not None and self.gpus:
            tasks = per_gpu * self.gpus
        if tasks is None and self._typed.has("pty"):
            # As in Slurm the first task gets the terminal; the others would fight for it.
            tasks = 1
        if tasks is None and self.per_node is None and self.gpus_per_task is None:
            # That of the job is for all of its nodes, and the daemon knows it.
            inherited = self.number("ntasks", None)
            tasks = None if inherited == self.job.get("ntasks") else inherited
        if per_gpu is not None and self.gpus is None:
            self.gpus = -(-(tasks or int(self.job.get("ntasks") or 1)) // per_gpu)
        return tasks

    def placement(self) -> dict[str, Any]:
        """What is asked of nodes, tasks, cores and GPUs, for POST /v1/steps. Raises: CommandError."""
        found: dict[str, Any] = {
            "tasks": self.tasks,
            "ntasks_per_node": self.per_node,
            "cpus_per_task": self.cpus_per_task,
            "gpus": self.gpus,
            "gpus_per_node": self.gpus_per_node,
            "gpus_per_task": self.gpus_per_task,
            "gpu_type": self.gpu_type,
        }
        if not any(self._typed.has(name) or name in self._variables for name in _ON_NODES):
            if len(self.job["nodes"]) > 1 and not self.job["holds_nodes"]:
                # Its command runs on every node, and so does the srun in it.
                found.update(nodes_min=1, nodelist=[self.job["node"]])
            return {name: value for name, value in found.items() if value is not None}
        from gpusched.addons.slurm.step_nodes import nodes_asked_for  # most steps name no nodes

        found.update(nodes_asked_for(self._command, self))
        return {name: value for name, value in found.items() if value is not None}

    def has(self, name: str) -> bool:
        return self._typed.has(name) or self._variables.get(name, "0").lower() not in ("0", "no", "")

    def text(self, name: str) -> str | None:
        """Value of an option; None if neither the command line nor a variable has it."""
        if self._typed.has(name):
            return self._typed.get(name)
        return self._variables.get(name)

    def flag_value(self, name: str) -> bool:
        """An option with an optional number: 0 is no."""
        text = self.text(name)
        return text is not None and text not in ("0", "no")

    def number(self, name: str, default: int | None, *, least: int = 1, typed_only: bool = False) -> int | None:
        """A whole number. Raises: CommandError."""
        text = self._typed.get(name) if self._typed.has(name) else None
        if text is None and not typed_only:
            text = self._variables.get(name)
        if text is None:
            return default
        if not (is_digits(text) and len(text) < 10 and int(text) >= least):
            raise self._command.error(f'Invalid numeric value "{printable(text)}" for --{name}.')
        return int(text)

    def _gpu_type(self) -> str | None:
        """Of all GPUs of the step; one that was typed counts, not one of a variable. Raises: CommandError for two."""
        typed = [kind for name, kind in self._gpu_types.items() if self._typed.has(name)]
        kinds = sorted({kind.lower(): kind for kind in typed or self._gpu_types.values()}.values())
        if len(kinds) > 1:
            raise self._two_types(*kinds[:2])
        return kinds[0] if kinds else None

    def _two_types(self, first: str, second: str) -> CommandError:
        return self._command.error(
            f"GPUs of two types, {printable(first)} and {printable(second)}, are not supported in one step; run one "
            "step for each",
            255,
        )

    def _gpus(self, name: str) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        try:
            kind, count = typed_count(text)
        except ValueError:
            if ":" in text or text.isdigit():
                raise self._command.error(f"Invalid --{name} specification", 255) from None
            # A type alone is one of it.
            kind, count = text, 1
        if kind:
            self._gpu_types[name] = kind
        return count

    def _gres(self) -> int | None:
        found = None
        for word in filter(None, (self.text("gres") or "").split(",")):
            parts = word.removeprefix("gres:").split(":")
            if parts[0] not in ("gpu", "none"):
                continue
            has_count = len(parts) > 1 and is_digits(parts[-1]) and len(parts[-1]) < 6
            kinds = parts[1 : len(parts) - has_count]
            if not all(parts) or len(kinds) > 1:
                raise self._command.error(BAD_GRES)
            if kinds:
                known = self._gpu_types.setdefault("gres", kinds[0])
                if known.lower() != kinds[0].lower():
                    raise self._two_types(known, kinds[0])
            found = (found or 0) + (0 if parts[0] == "none" else int(parts[-1]) if has_count else 1)
        return found

    def _limit(self) -> int | None:
        text = self._typed.get("time") if self._typed.has("time") else None
        if text is None:
            return None
        from gpusched.addons.slurm.values import parse_limit_s  # few steps have a limit

        try:
            limit_s = parse_limit_s(text)
        except ValueError:
            raise self._command.error("Invalid --time specification", 255) from None
        return None if limit_s is None else int(limit_s)
