"""What the nodes run containers with, who may, and what a run's engine has to know of its container."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gpusched.engine.linux import cdi, rootless
from gpusched.model.cluster import GpuReading, HostSample
from gpusched.model.container import PODMAN, RUNTIMES, is_allowed, is_image_file, runtime_of, why_not_mounted
from gpusched.model.execution import ContainerLaunch
from gpusched.model.job import Job, JobSpec, Run
from gpusched.model.settings import ContainerSettings, Settings
from gpusched.model.units import name_some, plural, printable

Trouble = tuple[str, str]
"""Why not, and what to do."""


class ContainerHost:
    """The container runtimes of the nodes.

    Args: node: the daemon's own. hosts: samples of all nodes, that of the daemon's own first. reading: of its GPUs.
    """

    def __init__(
        self, node: str, hosts: Callable[[], Iterable[HostSample]], reading: Callable[[], GpuReading | None]
    ) -> None:
        self.node = node
        self._hosts = hosts
        self._reading = reading

    def runtime(self, settings: ContainerSettings) -> str | None:
        """Name of the runtime that the settings choose, installed or not; None for none.

        Left to itself it is the first that the daemon's own node has, or else any node.
        """
        if settings.runtime == "none":
            return None
        if settings.runtime in RUNTIMES:
            return settings.runtime
        there = ([name for name in RUNTIMES if _path_of(name, host) is not None] for host in self._hosts())
        return next((names[0] for names in there if names), PODMAN)

    def is_installed(self, settings: ContainerSettings) -> bool:
        """Whether any node has the runtime."""
        runtime = self.runtime(settings)
        return runtime is not None and any(_path_of(runtime, host) is not None for host in self._hosts())

    def why_not(self, settings: ContainerSettings, user: str, uid: int) -> Trouble | None:
        """Why this user can run no containers; None if they can, for all that is known on the daemon's own node."""
        runtime = self.runtime(settings)
        if runtime is None:
            return "containers are switched off here, by [containers] runtime", "ask an admin, or leave --image out"
        if not self.is_installed(settings):
            where = self.node if len([*self._hosts()]) == 1 else "any node"
            if settings.runtime == "auto":
                what = f"neither {' nor '.join(RUNTIMES)} is installed on {where}"
            else:
                what = f"{runtime}, which [containers] runtime names, is not installed on {where}"
            return what, f"ask an admin to install it: sudo apt install {PODMAN} uidmap catatonit"
        return rootless.why_not_podman(user, uid) if runtime == PODMAN and self._program(PODMAN, self.node) else None

    def why_no_gpus(self, settings: ContainerSettings) -> Trouble | None:
        """Why containers can have no GPUs on the daemon's own node."""
        reading = self._reading()
        if self.runtime(settings) != PODMAN or reading is None or not reading.gpus or _is_simulated(reading):
            return None
        try:
            if cdi.read_devices():
                return None
        except cdi.CdiError as error:
            return str(error), f"ask an admin to make it again: {cdi.GENERATE}"
        folders = " or ".join(cdi.FOLDERS)
        return f"no CDI specification in {folders} names the GPUs of {self.node}", f"ask an admin for: {cdi.GENERATE}"

    def refusal(self, spec: JobSpec, user: str, uid: int, settings: Settings) -> Trouble | None:
        """Why this job cannot run in its container; None if it can.

        Of users and GPUs only the daemon's own node is looked at, if the job may run there: on the others the runtime
        says what is missing, in the pull.
        """
        launch, request = spec.launch, spec.request
        assert launch.image is not None
        rules = settings.containers
        if request.sm_percent is not None:
            return "--image runs without MPS, whose pipes are outside of the container", "leave --sm out, or --image"
        if launch.slurm:
            return "--image is for gsub and grun: srun in a container finds no Slurm", "submit it with gsub"
        is_here = self.node not in request.exclude and (not request.nodelist or self.node in request.nodelist)
        if (trouble := self.why_not(rules, user, uid)) is not None and (is_here or not self.is_installed(rules)):
            return self._or_elsewhere(trouble)
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
        trouble = self.why_no_gpus(rules) if request.gpus and is_here else None
        return None if trouble is None else self._or_elsewhere(trouble)

    def _or_elsewhere(self, trouble: Trouble) -> Trouble:
        """What is missing on the daemon's own node, and that other nodes may have it."""
        what, hint = trouble
        return trouble if len([*self._hosts()]) == 1 else (what, f"{hint}; or leave this node out: -x {self.node}")

    def _program(self, runtime: str, node: str) -> str | None:
        """Path of a runtime on a node."""
        return next((path for host in self._hosts() if host.name == node and (path := _path_of(runtime, host))), None)

    def launch_of(
        self, job: Job, run: Run, settings: Settings, reading: GpuReading | None
    ) -> ContainerLaunch | str | None:
        """The container of a run on one node, or the pull; a sentence if it cannot be started any more.

        Args: run: as on that node; reading: of its GPUs.
        """
        launch = job.spec.launch
        if launch.image is None:
            return None
        if job.spec.is_pull:
            runtime = job.spec.request.runtime or self.runtime(settings.containers) or ""
        elif launch.image_digest is None:
            return "its image has not been pulled"
        else:
            runtime = runtime_of(launch.image_digest)
        program = self._program(runtime, run.node) if runtime else None
        if settings.containers.runtime == "none" or program is None:
            return f"{runtime or 'a container runtime'} is not available on {run.node} any more"
        if job.spec.is_pull:
            return ContainerLaunch(runtime, program, launch.image, launch.image_digest or "", is_pull=True)
        gpus = []
        samples = {gpu.uuid: gpu for gpu in (() if reading is None else reading.gpus)}
        for share in () if _is_simulated(reading) else run.gpus:
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


def _path_of(runtime: str, host: HostSample) -> str | None:
    return next((path for path in host.runtimes if path.rpartition("/")[2] == runtime), None)


def _is_simulated(reading: GpuReading | None) -> bool:
    """Whether there are no devices to give to a container."""
    return reading is not None and reading.source == "simulated"
