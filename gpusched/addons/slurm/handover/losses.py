"""What an sbatch script, a Kubernetes Job and a job that is handed over cannot say of a submission: a note, a refusal,
or nothing lost.

Refused is what the job would fail, compute or disturb others without; a note names what is merely missing.
"""

from __future__ import annotations

from gpusched.errors import GpuschedError, Refused
from gpusched.model.container import is_image_file
from gpusched.model.spec import FIELDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Spec = dict[str, Any]

SBATCH, K8S, HANDOVER = "sbatch", "k8s", "handover"
TARGETS = {SBATCH: "an sbatch script", K8S: "a Kubernetes Job"}
"""What `gsub --print` makes."""
REFUSED, NOTE, NOTHING = "refused", "note", "nothing is lost"


class Loss:
    """One field that a target cannot say, always or in some cases."""

    __slots__ = ("case", "fate", "field", "is_lost", "targets", "why")

    def __init__(
        self,
        field: str,
        targets: str,
        fate: str,
        why: str,
        is_lost: Callable[[Any, Spec], bool] | None = None,
        case: str = "",
    ) -> None:
        """Args: is_lost: of the field's value and of all values, by default always; case: the same in words."""
        self.field = field
        self.targets = targets.split()
        self.fate = fate
        self.why = why
        self.is_lost = is_lost
        self.case = case

    @property
    def option(self) -> str:
        """How it is typed."""
        options = FIELDS[self.field].options
        return options[0].long if options else _TYPED_AS.get(self.field, self.field)


_TYPED_AS = {
    "gpu_fraction": "a fraction of a GPU, -g,",
    "gpu_shards": "--gres shard",
    "gpu_type": "a type of GPU, -g,",
    "log_keep": "--log-max",
    "nodes_max": "a range of nodes, -N,",
}


def is_mig(kind: str) -> bool:
    """Whether a type of GPU is a profile of MIG instances: `1g.10gb`."""
    slices, _, memory = kind.partition("g.")
    return slices.isdigit() and memory.removesuffix("gb").isdigit() and memory.endswith("gb")


def is_counted_from_zero(array: str) -> bool:
    """Whether an array has the tasks 0, 1, 2 and so on."""
    from gpusched.model.tasks import tasks_of  # few jobs are arrays

    ranges = tasks_of(array.partition("%")[0]).ranges
    return len(ranges) == 1 and ranges[0].start == 0 and ranges[0].step == 1


def count_of_tasks(array: str) -> int:
    """How many tasks an array has."""
    from gpusched.model.tasks import tasks_of  # as above

    return len(tasks_of(array.partition("%")[0]))


_SLURM_EVENTS = ("begin", "end", "fail", "time_limit_80", "array_tasks", "requeue")


def events_lost(words: list[str]) -> list[str]:
    """Events of alerts that Slurm has no mail for; its REQUEUE is both preempt and retry."""
    both = {"preempt", "retry"} if {"preempt", "retry"} <= set(words) else set()
    return [word for word in words if word not in _SLURM_EVENTS and word not in both]


_ANY_SLURM = "sbatch handover"
_PYXIS = "Slurm's own containers are a plug-in of the cluster"
_WHOLE_GPUS = "it books whole GPUs; use -g 1"
_ALERTS = "alerts are sent by gpusched alone"

LOSSES = (
    Loss("vram_mib", _ANY_SLURM, REFUSED, f"{_WHOLE_GPUS}, or -g 0.5 where the cluster has gres mps"),
    Loss("vram_mib", K8S, REFUSED, f"{_WHOLE_GPUS}, or a MIG instance, -g 1g.10gb"),
    Loss("variants", f"{_ANY_SLURM} {K8S}", REFUSED, "a job there has one request; name one of the variants"),
    Loss("min_vram_mib", _ANY_SLURM, REFUSED, "name a type, -g a100:1, or a feature of the cluster with -C"),
    Loss("min_vram_mib", K8S, REFUSED, "leave it out, and add a nodeSelector such as nvidia.com/gpu.product"),
    Loss(
        "gpu_fraction",
        _ANY_SLURM,
        REFUSED,
        "Slurm's gres mps counts whole percents of a GPU; use -g 0.5",
        lambda share, _: abs(share * 100 - round(share * 100)) > 1e-9,
        "not whole percents",
    ),
    Loss("gpu_fraction", _ANY_SLURM, NOTE, "written as --gres=mps, which the cluster must have"),
    Loss("gpu_fraction", K8S, REFUSED, f"{_WHOLE_GPUS}, or a MIG instance, -g 1g.10gb"),
    Loss("gpu_shards", SBATCH, NOTE, "written as --gres=shard, which the cluster must have"),
    Loss("gpu_shards", K8S, REFUSED, f"{_WHOLE_GPUS}, or a MIG instance, -g 1g.10gb"),
    Loss("sm_percent", _ANY_SLURM, NOTE, "written as --gres=mps, which the cluster must have"),
    Loss("sm_percent", K8S, REFUSED, f"{_WHOLE_GPUS}, or a MIG instance, -g 1g.10gb"),
    Loss(
        "gpu_type",
        K8S,
        REFUSED,
        "leave the type out, and add a nodeSelector such as nvidia.com/gpu.product",
        lambda kind, _: not is_mig(kind),
        "other than a MIG profile",
    ),
    Loss("gpus_linked", "sbatch k8s handover", NOTE, "the cluster chooses the GPUs of a node"),
    Loss("venv", "sbatch k8s handover", REFUSED, "activate it in the script: . DIR/bin/activate"),
    Loss("conda", "sbatch k8s handover", REFUSED, "activate it in the script, as conda's documentation says"),
    Loss("prolog", "sbatch k8s handover", REFUSED, "begin the script with what it does"),
    Loss("epilog", "sbatch k8s handover", REFUSED, "let the script do it in a trap: trap ./epilog.sh EXIT"),
    Loss("image", _ANY_SLURM, REFUSED, f"{_PYXIS}: srun --container-image in the script"),
    Loss(
        "image",
        K8S,
        REFUSED,
        "a .sif file is apptainer's; name an image of a registry",
        lambda image, _: is_image_file(image),
        "a .sif file",
    ),
    Loss("binds", _ANY_SLURM, REFUSED, f"{_PYXIS}: srun --container-mounts in the script"),
    Loss("binds", K8S, REFUSED, "a pod mounts volumes; add them to the manifest"),
    Loss("container_workdir", _ANY_SLURM, REFUSED, f"{_PYXIS}: srun --container-workdir in the script"),
    Loss("container_workdir", K8S, REFUSED, "use -D, which is the container's workingDir"),
    Loss("gpu_ids", "sbatch k8s handover", NOTE, "the cluster chooses the form of CUDA_VISIBLE_DEVICES"),
    Loss(
        "cpus",
        _ANY_SLURM,
        NOTE,
        "Slurm books whole cores, at least one for each task",
        lambda cores, _: cores != int(cores) or not cores,
        "a fraction, or 0",
    ),
    Loss("mem_mib", K8S, REFUSED, "a Job cannot ask for all memory; use -m 64G", lambda mib, _: mib == "all", "0"),
    Loss("resources", K8S, REFUSED, "extended resources have other names; add them to resources.limits"),
    Loss("licenses", K8S, REFUSED, "a Job books no licenses, and would run without"),
    Loss(
        "nodes",
        K8S,
        REFUSED,
        "a Job's pods do not start together; use -N 1, or a training operator such as Kubeflow's",
        lambda count, _: count > 1,
        "more than 1",
    ),
    Loss("nodes_max", K8S, REFUSED, "a Job's pods do not start together; use -N 1"),
    *(
        Loss(
            name,
            K8S,
            REFUSED,
            "there is no srun in a pod to start tasks; use one task, and -c for its cores",
            lambda count, _: count > 1,
            "more than 1",
        )
        for name in ("ntasks", "ntasks_per_node", "ntasks_per_gpu")
    ),
    Loss(
        "nodelist",
        _ANY_SLURM,
        REFUSED,
        "Slurm would take all of these nodes; name as many as the job has, or a feature of the cluster with -C",
        lambda names, spec: len(names) > max(spec.get("nodes", 1), spec.get("nodes_max") or 0),
        "more than -N",
    ),
    Loss("constraint", _ANY_SLURM, REFUSED, "Slurm cannot exclude a label (!)", lambda text, _: "!" in text, "with !"),
    Loss("constraint", K8S, REFUSED, "nodes of a Kubernetes cluster have other labels; add a nodeSelector"),
    Loss("prefer", K8S, NOTE, "nodes of a Kubernetes cluster have other labels"),
    Loss("near", "sbatch k8s", NOTE, "only gpusched knows which nodes have a data set"),
    Loss("exclusive", K8S, REFUSED, "a Job shares its node; ask for all of its cores"),
    Loss(
        "time_limit_s",
        "sbatch k8s",
        NOTE,
        "limits are learned by gpusched alone",
        lambda limit, _: limit == "auto",
        "auto",
    ),
    Loss(
        "time_limit_s",
        _ANY_SLURM,
        NOTE,
        "Slurm's limits are whole minutes; it is rounded up",
        lambda limit, _: isinstance(limit, int) and limit % 60 > 0,
        "not whole minutes",
    ),
    Loss("nice", K8S, NOTE, "priority comes from a PriorityClass; see --qos"),
    Loss(
        "qos",
        K8S,
        REFUSED,
        "not a valid PriorityClass name (lowercase letters, digits, - and .)",
        lambda word, _: not is_dns_name(word),
        "not a DNS name",
    ),
    Loss(
        "dependency",
        SBATCH,
        REFUSED,
        "the cluster has other ids; leave it out, and submit with: sbatch --dependency=afterok:ID",
        lambda text, _: text != "singleton",
        "other than singleton",
    ),
    Loss("dependency", K8S, REFUSED, "a Job waits for no other; use a workflow engine, or wait with: kubectl wait"),
    Loss("engine", "sbatch k8s", NOTHING, "the file is for the cluster that gets it"),
    Loss("burst", "sbatch k8s", NOTHING, "the file is for the cluster that gets it"),
    Loss("never_satisfied", K8S, NOTHING, "a Job waits for no other"),
    Loss("begin_at", K8S, REFUSED, "a Job starts at once; use -H and resume it, or make it a CronJob"),
    Loss("deadline_at", K8S, REFUSED, "a Job has no deadline by the calendar; use -t"),
    Loss("start_when", "sbatch k8s", REFUSED, "the cluster does not know energy prices"),
    Loss("reservation", K8S, REFUSED, "a Kubernetes cluster has no reservations"),
    Loss(
        "array",
        K8S,
        REFUSED,
        "an Indexed Job counts 0, 1, 2 and so on; use -a 0-9 and compute the number in the script",
        lambda text, _: not is_counted_from_zero(text),
        "not 0, 1, 2, ...",
    ),
    Loss(
        "array",
        K8S,
        REFUSED,
        "an Indexed Job has at most 100,000 tasks; print it in parts",
        lambda text, _: count_of_tasks(text) > 100_000,
        "more than 100,000",
    ),
    Loss("sweep", "sbatch k8s", REFUSED, "use an array, -a 0-9, and choose the value in the script"),
    Loss("max_fails", SBATCH, NOTE, "the other tasks continue"),
    Loss("retries", SBATCH, NOTE, "Slurm repeats no failed jobs"),
    Loss("backoff_s", SBATCH, NOTE, "Slurm repeats no failed jobs"),
    Loss("backoff_factor", SBATCH, NOTE, "Slurm repeats no failed jobs"),
    Loss("backoff_max_s", SBATCH, NOTE, "Slurm repeats no failed jobs"),
    Loss("retry_on", SBATCH, NOTE, "Slurm repeats no failed jobs"),
    Loss("backoff_s", K8S, NOTE, "a Job waits 10 s before it is repeated, then twice as long each time"),
    Loss("backoff_factor", K8S, NOTE, "a Job waits twice as long each time"),
    Loss("backoff_max_s", K8S, NOTE, "a Job waits up to 6 minutes"),
    Loss("retry_on", K8S, NOTE, "a Job is repeated after every failure, also at its time limit"),
    Loss("lost_after_s", SBATCH, NOTE, "SlurmdTimeout decides when the jobs of a silent node are lost"),
    Loss(
        "lost_after_s",
        K8S,
        NOTE,
        "the cluster decides when the pods of a silent node are lost, usually after 5 minutes",
    ),
    Loss("fallback", "sbatch k8s", NOTE, "nothing runs after the final failure"),
    Loss("ignore_idle", "sbatch k8s handover", NOTHING, "idle GPUs are watched by gpusched alone"),
    Loss("notice", K8S, NOTE, "a pod gets TERM when it is stopped, and no notice before its time limit"),
    Loss("grace_s", _ANY_SLURM, NOTE, "the time between TERM and KILL is the cluster's KillWait"),
    Loss(
        "notify",
        SBATCH,
        NOTE,
        "Slurm has no mail for these events",
        lambda words, _: bool(events_lost(words)),
        "others",
    ),
    Loss("notify", K8S, NOTE, _ALERTS),
    Loss(
        "notify_to",
        SBATCH,
        NOTE,
        f"{_ALERTS} to targets; Slurm takes a mail address",
        lambda names, _: not all("@" in name for name in names),
        "not mail addresses",
    ),
    Loss("notify_to", K8S, NOTE, _ALERTS),
    Loss("stdout", K8S, NOTE, "the output is in: kubectl logs"),
    Loss("stderr", K8S, NOTE, "the output is in: kubectl logs"),
    Loss("stdin", K8S, REFUSED, "a pod has no input file; redirect it in the command: < FILE"),
    Loss("open_mode", K8S, NOTHING, "there is no output file"),
    Loss("log_max_mib", "sbatch k8s handover", NOTE, "output files are rotated by gpusched alone"),
    Loss("ranks", SBATCH, NOTHING, "tasks of a command are started by srun, which the script runs"),
    Loss("ranks", K8S, NOTHING, "there is one task"),
    Loss("log_keep", "sbatch k8s handover", NOTHING, "already reported for --log-max"),
    Loss("key", "sbatch k8s", NOTE, "submitting the file twice makes two jobs"),
    Loss(
        "nice",
        HANDOVER,
        NOTE,
        "Slurm lets users lower priorities only",
        lambda points, _: points < 0,
        "below 0",
    ),
    Loss("snapshot", HANDOVER, REFUSED, "the copy of the code is on this server; use a folder that both share"),
    Loss("snapshot", "sbatch k8s", NOTE, "the job starts in the folder as it then is"),
)
"""Every field that a target cannot say; the others are written."""


def is_dns_name(word: str) -> bool:
    """Whether Kubernetes accepts the word as a name: small letters, digits, - and ., no more than 253."""
    parts = word.split(".")
    return len(word) <= 253 and all(
        part.replace("-", "").isalnum() and part.isascii() and part == part.lower() and part.strip("-") == part
        for part in parts
    )


def losses_of(target: str, values: Spec) -> list[Loss]:
    """What the target cannot say of these fields, in the order of the table; at most one loss for each field."""
    found: dict[str, Loss] = {}
    for loss in LOSSES:
        value = values.get(loss.field)
        is_default = value is None or (not value and loss.field != "cpus")
        if target in loss.targets and not is_default and (loss.is_lost is None or loss.is_lost(value, values)):
            found.setdefault(loss.field, loss)
    return list(found.values())


def check_losses(target: str, values: Spec) -> list[str]:
    """The notes on what is lost. Raises: Refused, naming every option that must not be lost."""
    errors: list[GpuschedError] = []
    notes = []
    for loss in losses_of(target, values):
        if loss.fate == REFUSED and target == HANDOVER:
            errors.append(Refused(f"{loss.option} is lost in Slurm, which gets the job: {loss.why}", _STAY, loss.field))
        elif loss.fate == REFUSED:
            errors.append(Refused(f"{loss.option} cannot be expressed in {TARGETS[target]}: {loss.why}", _HINT))
        elif loss.fate == NOTE:
            lost = events_lost(values["notify"]) if loss.field == "notify" and target == SBATCH else []
            what = f"{loss.option} {','.join(lost)}" if lost else loss.option.removesuffix(",")
            notes.append(f"{what}: {loss.why}")
    if errors:
        raise Refused.of(errors)
    return notes


_STAY = "leave it out, or keep the job on this cluster: --engine local"
_HINT = "the table of what is kept and what is not: docs/reference/job-files.md"
