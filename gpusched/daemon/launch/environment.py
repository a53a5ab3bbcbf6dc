"""The environment of a run: the captured one, gpusched's and SLURM_* variables, facts on earlier runs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

from gpusched.daemon.launch.ranks import node_environment, without_ranks
from gpusched.daemon.launch.slurm_variables import array_facts, is_of_a_job, slurm_variables
from gpusched.engine.linux.as_user import DEFAULT_PATH
from gpusched.lifecycle.arrays import swept
from gpusched.model.cluster import is_amd
from gpusched.model.execution import LaunchSite, unpack_environment
from gpusched.model.job import ArraySpec, Job, Launch, Run
from gpusched.model.layout import count_tasks, spread_tasks, tasks_on_nodes
from gpusched.model.settings import Settings
from gpusched.model.states import ReasonCode
from gpusched.model.static_gpus import CUDA_VARIABLE
from gpusched.ports import JobFilter, Store
from gpusched.slurm_commands import conf_beside, is_login_bash, login_path_beside

_NO_PAST: Mapping[str, str] = MappingProxyType({})
_PAST = frozenset(
    {
        *(f"GPUSCHED_PREVIOUS_{name}" for name in ("EXIT_CODE", "SIGNAL", "REASON", "STATE")),
        *(f"GPUSCHED_{name}" for name in ("FAILED_JOB_ID", "EXIT_CODE", "SIGNAL", "REASON")),
    }
)
"""Variables to drop from a captured environment, so that jobs do not pass on their own past to jobs they submit."""


def visible_devices(run: Run, form: str, index_of: Mapping[str, int], variable: str = CUDA_VARIABLE) -> str:
    """CUDA_VISIBLE_DEVICES of a run: current indexes, or UUIDs; empty without GPUs. MIG and MPS accept UUIDs only.

    Any other variable has indexes.

    Indexes are looked up at launch because they shift when a GPU is lost. A GPU without an index is named by
    UUID, which CUDA resolves or refuses, but never confuses.
    """
    return ",".join(visible_words(run, form, index_of, variable))


def visible_words(run: Run, form: str, index_of: Mapping[str, int], variable: str = CUDA_VARIABLE) -> list[str]:
    """The words of `visible_devices`, one for each GPU of the run, in its order."""
    if any(is_amd(share.uuid) for share in run.gpus):
        # HIP counts what ROCR_VISIBLE_DEVICES has left.
        return [str(place) for place in range(len(run.gpus))]
    indexes = [index_of.get(share.uuid) for share in run.gpus]
    if variable != CUDA_VARIABLE:
        return [str(share.index if index is None else index) for share, index in zip(run.gpus, indexes, strict=True)]
    needs_uuid = any(share.uuid.startswith("MIG-") or share.limit is not None for share in run.gpus)
    if form == "uuid" or None in indexes or needs_uuid:
        return [share.uuid for share in run.gpus]
    return [str(index) for index in indexes]


def gpu_form(launch: Launch, settings: Settings) -> str:
    """Form of CUDA_VISIBLE_DEVICES; a container with some of the GPUs renumbers them: only UUIDs are valid there."""
    return "uuid" if launch.image is not None else launch.gpu_ids or settings.gpu.ids


def _amd_environment(run: Run, index_of: Mapping[str, int]) -> dict[str, str | None]:
    """Variables that show a run its AMD GPUs alone; None: to be removed.

    ROCR's comes first in the stack and takes UUIDs, or numbers in the order of the kernel's KFD nodes; HIP's, for which
    CUDA_VISIBLE_DEVICES is another name, counts what that leaves. Empty, ROCR's hides all; HIP's would mean nothing.
    Source: ROCR-Runtime, amd_filter_device.cpp and amd_topology.cpp; ROCm documentation, GPU isolation techniques.
    """
    words = [
        share.uuid if share.uuid.startswith("GPU-") else str(index_of.get(share.uuid, share.index))
        for share in run.gpus
    ]
    return {
        "ROCR_VISIBLE_DEVICES": ",".join(words),
        "HIP_VISIBLE_DEVICES": None if words else "-1",
        "GPU_DEVICE_ORDINAL": None,
    }


def _mps_environment(run: Run, uid: int, site: LaunchSite, settings: Settings) -> dict[str, str]:
    """Variables that limit an MPS client to the run's share; it sees the GPU as device 0."""
    (share,) = run.gpus
    env = {
        "CUDA_MPS_PIPE_DIRECTORY": f"{settings.gpu.mps_dir or f'{site.mps}/{uid}'}/{share.uuid}",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={share.vram_mib}M",
    }
    if share.fraction is not None:
        env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(max(1, round(share.fraction * 100)))
    return env


_OF_VENV, _OF_CONDA = ("VIRTUAL_ENV", "VIRTUAL_ENV_PROMPT", "PYTHONHOME"), "CONDA_"
_OF_ACTIVE = ("PREFIX", "DEFAULT_ENV", "PROMPT_MODIFIER", "SHLVL")
"""What conda sets for an active environment, some with a number for those below; the rest says where conda is."""


def activated(base: Mapping[str, str], venv: str | None, conda: str | None) -> dict[str, str]:
    """A copy of an environment, with this virtual or conda environment active and no other."""
    env = dict(base)
    folder = venv or conda
    if folder is None:
        return env
    old = [name for name in env if name.startswith(tuple(f"{_OF_CONDA}{word}" for word in _OF_ACTIVE))]
    left = {f"{env[name]}/bin" for name in (*old, "VIRTUAL_ENV") if env.get(name)} | {f"{folder}/bin"}
    path = [entry for entry in env.get("PATH", DEFAULT_PATH).split(":") if entry not in left]
    for name in (*old, *_OF_VENV):
        env.pop(name, None)
    env["PATH"] = ":".join((f"{folder}/bin", *path))
    if venv is not None:
        env["VIRTUAL_ENV"] = venv
    else:
        parent, _, name = folder.rpartition("/")
        env["CONDA_PREFIX"], env["CONDA_SHLVL"] = folder, "1"
        env["CONDA_DEFAULT_ENV"] = name if parent.endswith("/envs") else folder
    return env


def checkpoint_folder(job: Job, site: LaunchSite, settings: Settings) -> str | None:
    """Checkpoint folder of a job, the same for all its runs."""
    base = settings.life.checkpoint_dir or site.checkpoints
    return f"{base}/{job.id}" if base else None


def job_environment(
    job: Job,
    run: Run,
    base: Mapping[str, str],
    site: LaunchSite,
    settings: Settings,
    index_of: Mapping[str, int],
    past: Mapping[str, str] = _NO_PAST,
    rank: int = 0,
    master: str = "",
    variable: str = CUDA_VARIABLE,
) -> dict[str, str]:
    """The complete environment of a run on one node: the captured one, then gpusched's and SLURM_* variables.

    Args: run: as on that node. base: see `captured`. past: the variables about earlier runs, see `past_environment`.
    rank: of the node in the run. master: address of a gang's first node. variable: that names the node's GPUs.
    """
    spec = job.spec
    request = spec.request
    env = activated(base, spec.launch.venv, spec.launch.conda)
    booked, most = request.cpus, max(spread_tasks(count_tasks(request, spec.layout), request.nodes))
    if request.bundles is not None:
        booked, most = run.cpus, tasks_on_nodes(request, spec.layout, run.on_each_node)[rank]
    cpus = max(1, int(booked), site.cpus if request.is_exclusive else 0)
    env.setdefault("OMP_NUM_THREADS", str(max(1, int(max(booked, cpus if request.is_exclusive else 0) / most))))
    gpu_ids = ",".join(str(index_of.get(share.uuid, share.index)) for share in run.gpus)
    env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    # Where another variable names the GPUs, there are none for CUDA.
    env[CUDA_VARIABLE] = ""
    env[variable] = visible_devices(run, gpu_form(spec.launch, settings), index_of, variable)
    if any(map(is_amd, index_of)):
        for key, value in _amd_environment(run, index_of).items():
            env.pop(key, None)
            if value is not None:
                env[key] = value
    is_limited = any(share.limit is not None for share in run.gpus)
    if settings.gpu.mps_dir is not None or is_limited:
        # Drop the submitter's values, which would bypass the limit or select another GPU's MPS.
        for key in [key for key in env if key.startswith("CUDA_MPS_")]:
            del env[key]
    if is_limited:
        env.update(_mps_environment(run, job.uid, site, settings))
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
    if site.commands and settings.slurm.commands_in_jobs:
        env["PATH"] = _with_commands(env.get("PATH", DEFAULT_PATH), site.commands)
        env["SLURM_CONF"] = conf_beside(site.commands)
    env["GPUSCHED_GPUS"] = str(len(run.gpus))
    env.update(past)
    env.update(slurm_variables(job, run, site.node, settings, gpu_ids, site.cpus, rank))
    env.update(node_environment(job, run, rank, master))
    if spec.array is not None and job.task is not None:
        env.update(_array_environment(job, spec.array, job.task))
    vram = [str(share.vram_mib) for share in run.gpus if share.vram_mib is not None]
    if vram:
        env["GPUSCHED_VRAM_MIB"] = ",".join(vram)
    return env


def add_login_path(env: dict[str, str], script: bytes | None, site: LaunchSite, settings: Settings) -> None:
    """Return Slurm's commands to the PATH of a script for a login bash, whose profile has reset it.

    Only its first line counts, and the user's own BASH_ENV stays.
    """
    has_commands = site.commands and settings.slurm.commands_in_jobs
    if has_commands and script is not None and "BASH_ENV" not in env and is_login_bash(script):
        env["BASH_ENV"] = login_path_beside(site.commands)


def _with_commands(path: str, folder: str) -> str:
    """PATH with this folder, at its end unless the user has put it elsewhere. An empty PATH is the current folder."""
    return path if folder in path.split(":") else f"{path}:{folder}"


def _array_environment(job: Job, array: ArraySpec, task: int) -> dict[str, str]:
    """Variables of a task: its number, its array and, in a sweep, its values under their names."""
    env = {f"GPUSCHED_ARRAY_{name}": value for name, value in array_facts(job, array, task).items()}
    return {**env, **(swept(array, task) if array.sweep else {})}


@lru_cache(maxsize=4)
def captured(environment: bytes) -> Mapping[str, str]:
    """A stored environment without the variables of an enclosing job, which would name the wrong allocation.

    Cached: jobs submitted together share one environment.
    """
    found = without_ranks(unpack_environment(environment)).items()
    return MappingProxyType({key: value for key, value in found if key not in _PAST and not is_of_a_job(key)})


def past_environment(job: Job, run: Run, store: Store) -> dict[str, str]:
    """Variables by name; empty for the first run of a plain job, without reading the table."""
    found: dict[str, str] = {}
    if job.restarts:
        earlier = [one for one in store.runs([job.id]) if one.number < run.number and one.start_at is not None]
        if earlier:
            found.update(_previous(earlier[-1]))
    if job.spec.fallback_of is not None:
        for failed in store.jobs(JobFilter(ids=frozenset({job.spec.fallback_of}))):
            found.update(_failed(failed))
    return found


def _previous(run: Run) -> dict[str, str]:
    """Variables about the end of the last started run."""
    return _end("GPUSCHED_PREVIOUS_", run.exit_code, run.signal, run.reason, str(run.outcome))


def _failed(job: Job) -> dict[str, str]:
    known = _end("GPUSCHED_", job.exit_code, job.signal, job.reason, str(job.state))
    del known["GPUSCHED_STATE"]  # would be mistaken for the fallback's own state
    return {"GPUSCHED_FAILED_JOB_ID": job.shown_id, **known}


def _end(prefix: str, code: int | None, signal: int | None, reason: ReasonCode | None, state: str) -> dict[str, str]:
    if code is None and signal is not None:
        code = 128 + signal  # as shells report it
    values: dict[str, object] = {"EXIT_CODE": code, "SIGNAL": signal, "REASON": reason, "STATE": state}
    return {prefix + name: str(value) for name, value in values.items() if value is not None}
