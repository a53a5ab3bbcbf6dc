"""What this server runs containers with, who may, and what a run's engine has to know of its container."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from gpusched.engine.linux import cdi, rootless
from gpusched.model.cluster import GpuSample
from gpusched.model.container import PODMAN, RUNTIMES, is_allowed, is_image_file, runtime_of, why_not_mounted
from gpusched.model.execution import ContainerLaunch
from gpusched.model.job import Job, JobSpec, Run
from gpusched.model.settings import ContainerSettings, Settings
from gpusched.model.units import name_some, plural, printable

Trouble = tuple[str, str]
"""Why not, and what to do."""


class ContainerHost:
    """The container runtimes of the daemon's own node.

    Args: is_simulated: whether the GPUs are not real, so that there are no devices to give to a container.
    """

    def __init__(self, node: str, is_simulated: Callable[[], bool]) -> None:
        self.node = node
        self._is_simulated = is_simulated

    def runtime(self, settings: ContainerSettings) -> str | None:
        """Name of the runtime that the settings choose, installed or not; None for none."""
        if settings.runtime == "none":
            return None
        if settings.runtime in RUNTIMES:
            return settings.runtime
        return next((one for one in RUNTIMES if rootless.find_program(one) is not None), PODMAN)

    def is_installed(self, settings: ContainerSettings) -> bool:
        runtime = self.runtime(settings)
        return runtime is not None and rootless.find_program(runtime) is not None

    def why_not(self, settings: ContainerSettings, user: str, uid: int) -> Trouble | None:
        """Why this user can run no containers here; None if they can, for all that is known."""
        runtime = self.runtime(settings)
        if runtime is None:
            return "containers are switched off here, by [containers] runtime", "ask an admin, or leave --image out"
        if not self.is_installed(settings):
            if settings.runtime == "auto":
                what = f"neither {' nor '.join(RUNTIMES)} is installed on {self.node}"
            else:
                what = f"{runtime}, which [containers] runtime names, is not installed on {self.node}"
            return what, f"ask an admin to install it: sudo apt install {PODMAN} uidmap catatonit"
        return rootless.why_not_podman(user, uid) if runtime == PODMAN else None

    def why_no_gpus(self, settings: ContainerSettings) -> Trouble | None:
        """Why containers can have no GPUs here."""
        if self.runtime(settings) != PODMAN or self._is_simulated():
            return None
        try:
            if cdi.read_devices():
                return None
        except cdi.CdiError as error:
            return str(error), f"ask an admin to make it again: {cdi.GENERATE}"
        folders = " or ".join(cdi.FOLDERS)
        return f"no CDI specification in {folders} names the GPUs of {self.node}", f"ask an admin for: {cdi.GENERATE}"

    def refusal(self, spec: JobSpec, user: str, uid: int, nodes: Iterable[str], settings: Settings) -> Trouble | None:
        """Why this job cannot run in its container; None if it can. Args: nodes: of the cluster."""
        launch, request = spec.launch, spec.request
        assert launch.image is not None
        rules = settings.containers
        names = [*nodes]
        if request.nodes > 1:
            return f"--image runs on one node, and {request.nodes} are requested", "leave -N out, or --image"
        if request.sm_percent is not None:
            return "--image runs without MPS, whose pipes are outside of the container", "leave --sm out, or --image"
        if launch.slurm:
            return "--image is for gsub and grun: srun in a container finds no Slurm", "submit it with gsub"
        if len(names) > 1 and request.nodelist != (self.node,):
            return f"--image runs on {self.node} only, where gpuschedd does", f"add: -w {self.node}"
        if (trouble := self.why_not(rules, user, uid)) is not None:
            return trouble
        runtime = self.runtime(rules)
        shown = printable(launch.image, 100)
        if is_image_file(launch.image) and runtime == PODMAN:
            return f"{shown} is a file for apptainer, and this server has podman", "name an image of a registry"
        if not is_allowed(launch.image, rules.allowed):
            where = name_some("", list(rules.allowed)).strip()
            return (
                f"{shown} is not among the images that [containers] allowed admits",
                f"name one of these, with the registry: {where}",
            )
        for folder in (launch.work_dir, *(bind.partition(":")[0] for bind in launch.binds)):
            if (why := why_not_mounted(folder.rstrip("/") or "/")) is not None:
                return why, "choose a folder below, with -D or --bind"
        return self.why_no_gpus(rules) if request.gpus else None

    def launch_of(
        self, job: Job, run: Run, settings: Settings, samples: Mapping[str, GpuSample]
    ) -> ContainerLaunch | str | None:
        """The container of a run, or the pull; a sentence if it cannot be started any more."""
        launch = job.spec.launch
        if launch.image is None:
            return None
        if job.spec.is_pull:
            runtime = self.runtime(settings.containers) or ""
        elif launch.image_digest is None:
            return "its image has not been pulled"
        else:
            runtime = runtime_of(launch.image_digest)
        program = rootless.find_program(runtime) if runtime else None
        if settings.containers.runtime == "none" or program is None:
            return f"{runtime or 'a container runtime'} is not available on {self.node} any more"
        if job.spec.is_pull:
            return ContainerLaunch(runtime, program, launch.image, is_pull=True)
        gpus = []
        for share in () if self._is_simulated() else run.gpus:
            sample = samples.get(share.uuid)
            if sample is None or (sample.minor is None and sample.mig_profile is None):
                return f"the device node of GPU {share.uuid} is unknown"
            gpus.append((share.uuid, None if sample.mig_profile is not None else sample.minor))
        assert launch.image_digest is not None
        return ContainerLaunch(
            runtime,
            program,
            launch.image_digest,
            binds=launch.binds,
            work_dir=launch.container_workdir or "",
            gpus=tuple(gpus),
        )

    def describe(self, settings: ContainerSettings) -> str:
        """What runs containers, and from where images may come, for the doctor."""
        allowed = (
            f"images of {plural(len(settings.allowed), 'place')}" if settings.allowed else "images of any registry"
        )
        return f"{self.runtime(settings)} runs containers, {allowed}"
