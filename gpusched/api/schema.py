"""The fields of a submission: one table that validation and the OpenAPI document both read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpusched.model.job import NICE_MAX, NICE_MIN, TIME_LIMIT_WORDS
from gpusched.model.units import MAX_MIB, MAX_SECONDS

MAX_GPUS = 1024
MAX_CPUS = 65536
MAX_RETRIES = 1000
MAX_NODES = 4096
MAX_UNITS = 1_000_000
"""Most of one license or custom resource that one job may ask for."""
MAX_LOGS = 100
MAX_NAME = 200
MAX_TEXT = 4096
"""Characters of a text, and of all texts of a list or map together; of paths it is what the kernel takes."""
MAX_DEPENDENCY = 8192
MAX_LIST = 1 << 16
MAX_NEEDS = 1 << 16
MAX_OWN = 1 << 62
"""For what has a limit of its own."""
MAX_INSTANT = 32503680000.0
"""Year 3000: a begin time above is a mistake in units."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field: JSON type, range or choices, and its meaning."""

    kind: str
    """string, integer, number, boolean, strings, map, counts, notice."""
    doc: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    nullable: bool = True
    exclusive_low: bool = False
    most: int = MAX_TEXT
    """Characters, of a list or map in all."""
    words: tuple[str, ...] = ()
    """What may be said in place of a number."""

    def json_schema(self) -> dict[str, Any]:
        """The field in JSON Schema's words, as the OpenAPI document shows it."""
        shape: dict[str, Any]
        if self.kind == "strings":
            shape = {"type": "array", "items": {"type": "string"}}
        elif self.kind == "map":
            shape = {"type": "object", "additionalProperties": {"type": "string"}}
        elif self.kind == "counts":
            number = {"type": "integer", "minimum": 1, "maximum": MAX_UNITS}
            shape = {"type": "object", "additionalProperties": number}
        elif self.kind == "notice":
            shape = {
                "type": "object",
                "required": ["signal", "before_s", "main_only"],
                "additionalProperties": False,
                "properties": {
                    "signal": {"type": "integer", "minimum": 1, "maximum": 64},
                    "before_s": {"type": "integer", "minimum": 0, "maximum": MAX_SECONDS},
                    "main_only": {"type": "boolean"},
                },
            }
        else:
            shape = {"type": self.kind}
        if self.kind == "string" and not self.choices and self.most < MAX_OWN:
            shape["maxLength"] = self.most
        if self.low is not None:
            shape["exclusiveMinimum" if self.exclusive_low else "minimum"] = self.low
        if self.high is not None:
            shape["maximum"] = self.high
        if self.choices:
            shape["enum"] = list(self.choices)
        if self.words:
            shape["pattern"] = f"^({'|'.join(self.words)})$"
        if self.nullable:
            shape["type"] = [shape["type"], *(["string"] if self.words else []), "null"]
            if self.choices:
                shape["enum"].append(None)
        shape["description"] = self.doc
        return shape


REQUEST_FIELDS: dict[str, Field] = {
    "gpus": Field("integer", "GPUs on all nodes together, the same number on each; 0 for none.", 0, MAX_GPUS),
    "gpus_per_node": Field("integer", "GPUs on each node; in place of `gpus`.", 0, MAX_GPUS),
    "gpu_fraction": Field("number", "Share of one card.", 0, 1, exclusive_low=True),
    "gpu_type": Field("string", "Part of the GPU's model name."),
    "vram_mib": Field("integer", "VRAM on each card, sharing it, in MiB.", 1, MAX_MIB),
    "min_vram_mib": Field("integer", "Least VRAM of each card, in MiB.", 1, MAX_MIB),
    "gpus_linked": Field("boolean", "The cards of each node must be linked with each other."),
    "cpus": Field("number", "Cores on each node; 0 books none.", 0, MAX_CPUS),
    "mem_mib": Field("integer", "Host memory on each node in MiB; 0 books none.", 0, MAX_MIB),
    "resources": Field("counts", "Custom resources on each node: names and numbers."),
    "licenses": Field("counts", "Licenses of the whole cluster: names and numbers."),
    "nodes": Field("integer", "Nodes, all at once.", 1, MAX_NODES),
    "nodelist": Field("strings", "Only these nodes; a text may name several, as gpu[01-03].", most=MAX_LIST),
    "exclude": Field("strings", "None of these nodes; a text may name several.", most=MAX_LIST),
    "constraint": Field("string", "Labels a node must have: a100&nvlink, imagenet|coco, !old."),
    "prefer": Field("string", "As constraint, but nodes without them will do."),
    "exclusive": Field("boolean", "Nothing else runs on the job's nodes."),
}

RETRY_FIELDS: dict[str, Field] = {
    "retries": Field("integer", "Attempts after the first.", 0, MAX_RETRIES),
    "backoff_s": Field("number", "Wait before the first retry, in seconds.", 0, MAX_SECONDS),
    "backoff_factor": Field("number", "Growth of the wait from retry to retry.", 1, 1000),
    "backoff_max_s": Field("number", "Longest wait between retries, in seconds.", 0, MAX_SECONDS),
    "retry_on": Field("strings", "Classes of failure that are retried."),
    "requeue": Field("boolean", "Repeat for free a run lost to the machine."),
}

LAUNCH_FIELDS: dict[str, Field] = {
    "argv": Field("strings", "Command and arguments; with a script its arguments only.", most=MAX_OWN),
    "script": Field("string", "Text of the script, beginning with #!.", most=MAX_OWN),
    "script_name": Field("string", "What the user calls the script."),
    "env": Field("map", "Captured environment.", most=MAX_OWN),
    "env_named": Field("strings", "Variables of env that [submit] env_exclude does not leave out.", most=MAX_OWN),
    "work_dir": Field("string", "Working directory, absolute."),
    "submit_dir": Field("string", "Folder of relative outputs, absolute; the working directory unless it is given."),
    "umask": Field("integer", "File mode mask of the submitter.", 0, 0o777),
    "stdout": Field("string", "Output pattern."),
    "stderr": Field("string", "Error pattern; absent: into the output."),
    "open_mode": Field("string", "What to do with a file that exists.", choices=("truncate", "append")),
    "notice": Field("notice", "Signal some time before the time limit, or first when the job is stopped before."),
    "stop_signal": Field(
        "integer",
        "First signal when the job is stopped; unless set TERM, before the time limit that of `notice`.",
        1,
        64,
    ),
    "grace_s": Field("number", "Between the first signal and KILL, in seconds.", 0, 86400),
    "log_max_mib": Field("integer", "Put an output file aside when it has grown to this size, in MiB.", 1, MAX_MIB),
    "log_keep": Field("integer", "How many files put aside are kept; 0 empties the file instead.", 0, MAX_LOGS),
    "gpu_ids": Field("string", "Form of CUDA_VISIBLE_DEVICES.", choices=("index", "uuid")),
}

JOB_FIELDS: dict[str, Field] = {
    "name": Field("string", "Name of the job."),
    "account": Field("string", "Account the usage goes to."),
    "queue": Field("string", "Queue the job waits in."),
    "nice": Field("integer", "Lowers the priority; below 0 raises it.", NICE_MIN, NICE_MAX),
    "time_limit_s": Field(
        "integer",
        "Time limit in seconds; auto for one that jobs like it keep, unlimited for none, null for the default.",
        1,
        MAX_SECONDS,
        words=TIME_LIMIT_WORDS,
    ),
    "begin_at": Field("number", "Not before this instant, UTC epoch seconds.", 0, MAX_INSTANT),
    "dependency": Field("string", "Slurm's syntax, afterok:41,afterany:42.", most=MAX_DEPENDENCY),
    "never_satisfied": Field(
        "string", "What becomes of it when its dependency can never come true.", choices=("cancel", "wait")
    ),
    "qos": Field("string", "Quality of service."),
    "deadline_at": Field("number", "To have ended by this instant, UTC epoch seconds.", 0, MAX_INSTANT),
    "reservation": Field("string", "Runs inside this reservation only."),
    "fallback": Field("string", "Shell line that runs once after the last failure, as a job of its own.", most=MAX_OWN),
    "ignore_idle": Field("boolean", "Its GPUs may do nothing for as long as it likes."),
    "hold": Field("boolean", "Keep the job from starting until it is released."),
    "snapshot": Field("string", "Name of the copy of the code that the working directory is in."),
    "key": Field("string", "Submitting the same key again, by the same user, finds the job of the first time."),
}

INTERACTIVE_FIELDS: dict[str, Field] = {
    "interactive": Field(
        "string",
        "The job waits for a client before it starts, and has a terminal or three pipes for it.",
        choices=("pty", "pipes"),
    ),
    "keep": Field(
        "boolean",
        "It goes on when its client is gone; else it ends with that, and with the submitting process while it waits.",
    ),
    "lease_s": Field(
        "integer", "It ends after so many seconds in which nothing happened in it; 0 for never.", 0, MAX_SECONDS
    ),
}

ALERT_FIELDS: dict[str, Field] = {
    "notify": Field("strings", "What to tell the owner of: begin, end, fail, ..., all."),
    "notify_to": Field("strings", "Only these targets of the owner, or mail addresses.", most=MAX_LIST),
}

ARRAY_FIELDS: dict[str, Field] = {
    "array": Field("string", "Tasks in Slurm's words, 0-9,20-30:2%4; %4 lets four of them run at once.", most=1 << 14),
    "max_fails": Field("integer", "When more tasks than this have failed, the rest is cancelled.", 0, 4_000_000),
    "sweep": Field("strings", "NAME=VALUES: lr=1e-3,1e-4 or seed=0..4; every combination is a task.", most=1 << 18),
}

SPEC_FIELDS: dict[str, Field] = {
    **ARRAY_FIELDS,
    **JOB_FIELDS,
    **REQUEST_FIELDS,
    **RETRY_FIELDS,
    **LAUNCH_FIELDS,
    **INTERACTIVE_FIELDS,
    **ALERT_FIELDS,
}

UPDATE_FIELDS: dict[str, Field] = {
    name: field
    for name, field in {
        **JOB_FIELDS,
        **REQUEST_FIELDS,
        "retries": RETRY_FIELDS["retries"],
        **ALERT_FIELDS,
        "throttle": Field("integer", "Of an array: so many tasks may run at once; null for no limit.", 1, 4_000_000),
    }.items()
    if name not in ("hold", "key", "snapshot")
}
