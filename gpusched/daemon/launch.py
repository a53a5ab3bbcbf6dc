"""From a job, its run and a placement to the ticket that an engine can start.

Pure but for the payloads handed in: paths are worked out, not opened; the environment is built, not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from gpusched.lifecycle.arrays import fill, swept
from gpusched.lifecycle.output_paths import values_of
from gpusched.model.cluster import Enforcement, GpuReading
from gpusched.model.execution import Cage, Ticket, unpack_environment
from gpusched.model.job import ArraySpec, Job, JobSpec, Run
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Placement
from gpusched.model.tasks import tasks_of
from gpusched.model.value import replace


@dataclass(frozen=True, slots=True)
class Site:
    """What jobs are told about where they run."""

    node: str
    socket: str
    cluster: str = "gpusched"
    checkpoints: str = ""
    """Folder of the jobs' checkpoint folders, unless the settings name one; empty for none."""
    spool: str = ""
    """Folder in which runs in the foreground have their sockets; empty for none."""


_NO_PAST: Mapping[str, str] = MappingProxyType({})
_PAST = frozenset(
    {
        *(f"GPUSCHED_PREVIOUS_{name}" for name in ("EXIT_CODE", "SIGNAL", "REASON", "STATE")),
        *(f"GPUSCHED_{name}" for name in ("FAILED_JOB_ID", "EXIT_CODE", "SIGNAL", "REASON")),
    }
)
"""What may be left over in a captured environment: a job that submits others must not pass its own past on."""


def visible_devices(run: Run, form: str, index_of: Mapping[str, int]) -> str:
    """CUDA_VISIBLE_DEVICES of a run: indexes as of now, or UUIDs; empty without GPUs. MIG and MPS take UUIDs only.

    The index is looked up at launch because it shifts when a card is lost; a card that has none now is
    named by UUID, which CUDA resolves or refuses, never mistakes.
    """
    indexes = [index_of.get(share.uuid) for share in run.gpus]
    needs_uuid = any(share.uuid.startswith("MIG-") or share.limit is not None for share in run.gpus)
    if form == "uuid" or None in indexes or needs_uuid:
        return ",".join(share.uuid for share in run.gpus)
    return ",".join(str(index) for index in indexes)


def with_limit(placement: Placement, reading: GpuReading | None, settings: Settings) -> Placement:
    """The placement as it is recorded: a slice of one card is started under MPS where that runs.

    Slices of several cards are not: each card has an MPS of its own, and a process can be with one alone.
    """
    if settings.gpu.mps_dir is None or reading is None or len(placement.gpus) != 1:
        return placement
    (share,) = placement.gpus
    is_there = any(gpu.uuid == share.uuid and gpu.mps for gpu in reading.gpus)
    if share.is_whole or share.vram_mib is None or not is_there:
        return placement
    return replace(placement, gpus=(replace(share, limit=Enforcement.MPS),))


def _mps_environment(run: Run, settings: Settings) -> dict[str, str]:
    """What holds a client of MPS to the run's share; the card is device 0 of what it sees."""
    (share,) = run.gpus
    env = {
        "CUDA_MPS_PIPE_DIRECTORY": f"{settings.gpu.mps_dir}/{share.uuid}",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={share.vram_mib}M",
    }
    if share.fraction is not None:
        env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(max(1, round(share.fraction * 100)))
    return env


def checkpoint_folder(job: Job, site: Site, settings: Settings) -> str | None:
    """Where the job may keep what it needs to go on; the same for all its runs."""
    base = settings.life.checkpoint_dir or site.checkpoints
    return f"{base}/{job.id}" if base else None


def job_environment(
    job: Job,
    run: Run,
    base: Mapping[str, str],
    site: Site,
    settings: Settings,
    index_of: Mapping[str, int],
    past: Mapping[str, str] = _NO_PAST,
) -> dict[str, str]:
    """The whole environment of a run: what was captured, then what gpusched and Slurm's readers need.

    `past` are the variables that tell of earlier runs, see `past`.
    """
    return _environment(job, run, _without_enclosing(base), site, settings, index_of, past)


def _without_enclosing(base: Mapping[str, str]) -> dict[str, str]:
    """A captured environment without what is left over from an enclosing job: it would name the wrong allocation."""
    return {key: value for key, value in base.items() if key not in _PAST and not key.startswith(("SLURM_", "SLURMD_"))}


def _environment(
    job: Job,
    run: Run,
    base: Mapping[str, str],
    site: Site,
    settings: Settings,
    index_of: Mapping[str, int],
    past: Mapping[str, str],
) -> dict[str, str]:
    spec = job.spec
    request = spec.request
    env = dict(base)
    cpus = max(1, int(request.cpus))
    env.setdefault("OMP_NUM_THREADS", str(cpus))
    gpu_ids = ",".join(str(index_of.get(share.uuid, share.index)) for share in run.gpus)
    env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    env["CUDA_VISIBLE_DEVICES"] = visible_devices(run, spec.launch.gpu_ids or settings.gpu.ids, index_of)
    if settings.gpu.mps_dir is not None:
        # Whatever the submitter had: it would lead past the limit, or to the MPS of another card.
        for key in [key for key in env if key.startswith("CUDA_MPS_")]:
            del env[key]
        if any(share.limit is not None for share in run.gpus):
            env.update(_mps_environment(run, settings))
    own = {
        "JOB_ID": str(job.id),
        "JOB_NAME": spec.name,
        "SUBMIT_DIR": spec.launch.submit_dir or spec.launch.work_dir,
        "CPUS_ON_NODE": str(cpus),
        "RESTART_COUNT": str(job.restarts),
    }
    env.update({f"GPUSCHED_{name}": value for name, value in own.items()})
    env["GPUSCHED_RUN"] = run.id
    env["GPUSCHED_SOCKET"] = site.socket
    if (folder := checkpoint_folder(job, site, settings)) is not None:
        env["GPUSCHED_CHECKPOINT_DIR"] = folder
    env["GPUSCHED_GPUS"] = str(len(run.gpus))
    env.update(past)
    env.update({f"SLURM_{name}": value for name, value in own.items() if name != "RESTART_COUNT"})
    if job.restarts:
        env["SLURM_RESTART_COUNT"] = str(job.restarts)
    env.update(
        {
            "SLURM_JOBID": str(job.id),
            "SLURM_JOB_USER": job.user,
            "SLURM_JOB_UID": str(job.uid),
            "SLURM_JOB_ACCOUNT": spec.account or job.user,
            "SLURM_JOB_PARTITION": spec.queue,
            "SLURM_CLUSTER_NAME": site.cluster,
            "SLURM_SUBMIT_HOST": site.node,
            "SLURMD_NODENAME": run.node,
            "SLURM_JOB_NODELIST": run.node,
            "SLURM_NODELIST": run.node,
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_NNODES": "1",
            "SLURM_NODEID": "0",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_JOB_CPUS_PER_NODE": str(cpus),
            "SLURM_CPUS_PER_TASK": str(cpus),
            "SLURM_TASKS_PER_NODE": "1",
        }
    )
    if spec.array is not None and job.task is not None:
        env.update(_array_environment(job, spec.array, job.task))
    if request.mem_mib:
        env["SLURM_MEM_PER_NODE"] = str(request.mem_mib)
    if run.gpus:
        env["SLURM_JOB_GPUS"] = gpu_ids
        env["SLURM_GPUS_ON_NODE"] = str(len(run.gpus))
        vram = [str(share.vram_mib) for share in run.gpus if share.vram_mib is not None]
        if vram:
            env["GPUSCHED_VRAM_MIB"] = ",".join(vram)
    return env


def _array_environment(job: Job, array: ArraySpec, task: int) -> dict[str, str]:
    """What a task is told of itself and its array; of a sweep, its values under their names."""
    tasks = tasks_of(array.tasks)
    first = tasks.ranges[0]
    facts = {
        "JOB_ID": str(job.array_id),
        "TASK_ID": str(task),
        "TASK_COUNT": str(len(tasks)),
        "TASK_MIN": str(first[0]),
        "TASK_MAX": str(tasks.ranges[-1][-1]),
        "TASK_STEP": str(first.step),
    }
    env = {f"{prefix}_ARRAY_{name}": value for prefix in ("GPUSCHED", "SLURM") for name, value in facts.items()}
    return {**env, **(swept(array, task) if array.sweep else {})}


def _script(job: Job, script: bytes | None) -> bytes | None:
    """The script; a shell line of a sweep with its values in their places. A script of its own is left as it is."""
    values = values_of(job)
    if script is None or not values or job.spec.launch.script_name != "wrap":
        return script
    return fill(script.decode("utf-8", "surrogateescape"), values).encode("utf-8", "surrogateescape")


@lru_cache(maxsize=4)
def _captured(environment: bytes) -> Mapping[str, str]:
    """A stored environment as runs get it; jobs that were submitted together have one and the same."""
    return MappingProxyType(_without_enclosing(unpack_environment(environment)))


def make_ticket(
    job: Job,
    run: Run,
    script: bytes | None,
    environment: bytes,
    site: Site,
    settings: Settings,
    index_of: Mapping[str, int],
    past: Mapping[str, str] = _NO_PAST,
    cage: Cage | None = None,
) -> Ticket:
    """Everything an engine needs to start this run."""
    spec: JobSpec = job.spec
    launch = spec.launch
    assert run.stdout_path is not None  # recorded with the intent to start it
    grace_s = settings.life.grace_s if launch.grace_s is None else launch.grace_s
    return Ticket(
        run=run.id,
        uid=job.uid,
        user=job.user,
        argv=tuple(fill(word, values_of(job)) for word in launch.argv),
        script=_script(job, script),
        env=_environment(job, run, _captured(environment), site, settings, index_of, past),
        work_dir=launch.work_dir,
        snapshot=spec.snapshot,
        umask=launch.umask,
        stdout_path=run.stdout_path,
        stderr_path=run.stderr_path,
        append=launch.open_mode == "append",
        time_limit_s=spec.time_limit_s,
        grace_s=grace_s,
        # Others count on its end.
        limit_grace_s=min(grace_s, settings.life.limit_grace_s),
        leftover_grace_s=settings.life.leftover_grace_s,
        stop_signal=launch.stop_signal,
        notice=launch.notice,
        has_gpus=bool(run.gpus),
        interactive=spec.interactive,
        log_mib=settings.interactive.log_mib,
        checkpoint_dir=checkpoint_folder(job, site, settings),
        log_max_mib=launch.log_max_mib,
        log_keep=launch.log_keep,
        # What an adopted process was started in stays as it is.
        cage=cage if spec.adopted is None else None,
        adopt=spec.adopted,
    )
