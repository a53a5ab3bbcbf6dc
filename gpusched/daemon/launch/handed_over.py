"""What the engine of handed-over runs gets: a script with the job's environment, and how to find the run again."""

from __future__ import annotations

from collections.abc import Mapping

from gpusched.daemon.launch.environment import captured
from gpusched.daemon.launch.slurm_variables import array_facts
from gpusched.lifecycle.arrays import swept
from gpusched.model.execution import NativeRun, Ticket
from gpusched.model.job import Job, Run
from gpusched.model.settings import Settings
from gpusched.ports import Handover

_ANEW = frozenset({"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "TMPDIR"})
"""Variables of the submitter's machine that the other scheduler sets, or that mean nothing on its nodes."""


def native_run(job: Job, run: Run, settings: Settings) -> NativeRun | None:
    """How the engine finds a run that was handed over, and stops it; None for any other run."""
    if run.native is None:
        return None
    launch = job.spec.launch
    signal = launch.stop_signal if launch.notice is None else launch.notice.signal
    return NativeRun(
        mark=run.mark,
        uid=job.uid,
        user=job.user,
        id=run.native.id,
        signal=signal,
        grace_s=settings.life.grace_s if launch.grace_s is None else launch.grace_s,
    )


def handover_ticket(
    job: Job,
    run: Run,
    script: bytes | None,
    environment: bytes,
    settings: Settings,
    past: Mapping[str, str],
    handover: Handover | None,
) -> Ticket:
    """The ticket of a run that is handed over. Raises: Refused for what no script for Slurm can say.

    Args: handover: what takes it; None while the settings name none, and it waits.
    """
    env = handover_environment(job, run, captured(environment), past)
    text = b""
    if handover is not None:
        text = handover.script(job, run, settings.queue.get(job.spec.queue), script, env)
    assert run.stdout_path is not None  # recorded with the intent
    return Ticket(
        run=run.id,
        uid=job.uid,
        user=job.user,
        launch=job.spec.launch,
        script=text,
        env={},
        stdout_path=run.stdout_path,
        stderr_path=run.stderr_path,
        append=False,
        time_limit_s=job.spec.time_limit_s,
        grace_s=0.0,
        leftover_grace_s=0.0,
        has_gpus=False,
        node=run.node,
        native=native_run(job, run, settings),
    )


def handover_environment(job: Job, run: Run, base: Mapping[str, str], past: Mapping[str, str]) -> dict[str, str]:
    """The variables of a run in another scheduler, which adds its own: the captured ones, facts on the job."""
    spec = job.spec
    env = {name: value for name, value in base.items() if name not in _ANEW}
    own = {
        "JOB_ID": str(job.id),
        "JOB_NAME": spec.name,
        "RUN": run.id,
        "SUBMIT_DIR": spec.launch.submit_dir or spec.launch.work_dir,
        "RESTART_COUNT": str(job.restarts),
    }
    env.update({f"GPUSCHED_{name}": value for name, value in own.items()})
    env.update(past)
    if spec.array is not None and job.task is not None:
        facts = array_facts(job, spec.array, job.task)
        env.update(
            {f"{prefix}_ARRAY_{name}": value for prefix in ("GPUSCHED", "SLURM") for name, value in facts.items()}
        )
        if spec.array.sweep:
            env.update(swept(spec.array, job.task))
    return env
