"""Turns a job, its run and a placement into a ticket that an engine can start.

Pure except for the payloads handed in: it computes paths without opening them, and builds the environment
without reading its own.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping

from gpusched.daemon.launch.containers import ContainerHost
from gpusched.daemon.launch.environment import (
    _NO_PAST,
    add_login_path,
    captured,
    checkpoint_folder,
    gpu_form,
    job_environment,
    past_environment,
    visible_words,
)
from gpusched.daemon.launch.handed_over import handover_ticket
from gpusched.daemon.launch.ranks import launches
from gpusched.daemon.leases import lease_of
from gpusched.daemon.nodes import ClusterNodes
from gpusched.errors import Refused
from gpusched.lifecycle.arrays import fill
from gpusched.lifecycle.output_paths import input_path, output_paths, values_of
from gpusched.lifecycle.transitions import rule_of
from gpusched.model.execution import ContainerLaunch, FetchLimits, LaunchSite, RunLimits, SiteProgram, Ticket
from gpusched.model.job import Interactive, Job, JobSpec, Run
from gpusched.model.layout import holds_other_nodes
from gpusched.model.settings import EpilogSettings, PrologSettings, Settings
from gpusched.model.static_gpus import CUDA_VARIABLE
from gpusched.model.value import replace
from gpusched.ports import Handover, Store


def _script(job: Job, script: bytes | None) -> bytes | None:
    """The script. Sweep values are filled into a shell line; a script is unchanged."""
    values = values_of(job)
    if script is None or not values or job.spec.launch.script_name != "wrap":
        return script
    return fill(script.decode("utf-8", "surrogateescape"), values).encode("utf-8", "surrogateescape")


def make_ticket(
    job: Job,
    run: Run,
    script: bytes | None,
    environment: bytes,
    site: LaunchSite,
    settings: Settings,
    index_of: Mapping[str, int],
    past: Mapping[str, str] = _NO_PAST,
    limits: RunLimits | None = None,
    rank: int = 0,
    master: str = "",
    lost_after_s: float | None = None,
    container: ContainerLaunch | None = None,
    variable: str = CUDA_VARIABLE,
    spare_folder: str | None = None,
) -> Ticket:
    """Build the ticket that an engine needs to start this run on one node.

    Args: run: as on that node; rank: of the node in the run; master: address of a gang's first node. lost_after_s: its
    lease, on another node than the daemon's. variable: that names the GPUs of the node. spare_folder: a checkpoint
    folder there that is needed no more.
    """
    spec: JobSpec = job.spec
    launch = spec.launch
    stdout_path, stderr_path = run.stdout_path, run.stderr_path
    devices = visible_words(run, gpu_form(launch, settings), index_of, variable)
    ranks = launches(job, run, rank, settings.default.output, devices, variable)
    if rank:
        first = ranks[0].number if ranks else None
        stdout_path, stderr_path = output_paths(job, run.number, run.node, settings.default.output, rank, first)
    assert stdout_path is not None  # recorded with the intent to start it
    grace_s = settings.life.grace_s if launch.grace_s is None else launch.grace_s
    env = job_environment(job, run, captured(environment), site, settings, index_of, past, rank, master, variable)
    add_login_path(env, script, site, settings)
    return Ticket(
        run=run.id,
        uid=job.uid,
        user=job.user,
        launch=replace(
            launch,
            argv=tuple(fill(word, values_of(job)) for word in launch.argv),
            prolog=_beside(launch.prolog),
            epilog=_beside(launch.epilog),
        ),
        script=_script(job, script),
        env=env,
        snapshot=spec.snapshot,
        snapshot_limits=_fetch_limits(settings) if spec.snapshot and site.fetches_snapshots else None,
        stdout_path=stdout_path,
        stderr_path=stderr_path,
        stdin_path=None if ranks else input_path(job, run.node, rank),
        append=launch.open_mode == "append",
        time_limit_s=spec.time_limit_s,
        grace_s=grace_s,
        # Other jobs are planned around its end.
        limit_grace_s=min(grace_s, settings.life.limit_grace_s),
        leftover_grace_s=settings.life.leftover_grace_s,
        has_gpus=bool(run.gpus),
        interactive=_foreground(spec.interactive, run),
        log_mib=settings.interactive.log_mib,
        checkpoint_dir=checkpoint_folder(job, site, settings),
        spare_checkpoint_dir=spare_folder,
        # An adopted process stays under the limits it was started with.
        limits=limits if spec.adopted is None else None,
        slurm=run.node if launch.slurm else "",
        adopt=spec.adopted,
        node=run.node,
        ranks=ranks,
        master_port=None if rank else run.master_port,
        outputs=site.outputs,
        output_mib=settings.limit.node_output_mib,
        gpus=tuple((share.uuid, index_of.get(share.uuid, share.index)) for share in run.gpus),
        requeue=rule_of(job).requeue,
        lost_after_s=lost_after_s,
        prolog_timeout_s=settings.prolog.job_timeout_s,
        epilog_timeout_s=settings.epilog.job_timeout_s,
        site_prolog=_of_site(settings.prolog, spec),
        site_epilog=_of_site(settings.epilog, spec),
        container=container,
    )


def started_parts(job: Job, run: Run) -> tuple[int, ...]:
    """The ranks of the run's nodes on which a part of it is started; the first alone where an earlier version, which
    held no nodes, started a job whose command runs on its first node.
    """
    if not holds_other_nodes(job.spec):
        return tuple(range(len(run.nodes)))
    return (0, *(rank for rank, part in enumerate(run.parts) if part.holds))


def holding(ticket: Ticket) -> Ticket:
    """The ticket of a part that holds its node: with the cage and the environment of the job there, and no command."""
    return replace(
        ticket,
        holds=True,
        launch=replace(ticket.launch, argv=(), prolog=None, epilog=None),
        script=None,
        stdout_path="/dev/null",
        stderr_path=None,
        stdin_path=None,
        interactive=None,
    )


def _beside(path: str | None) -> str | None:
    """A program by its path, also if that is a mere name: it is not searched for in PATH."""
    return path if path is None or "/" in path else f"./{path}"


def _of_site(found: PrologSettings | EpilogSettings, spec: JobSpec) -> SiteProgram | None:
    """None for an adopted process, whose start the site has missed."""
    if found.path is None or spec.adopted is not None:
        return None
    return SiteProgram(found.path, found.timeout_s)


def _fetch_limits(settings: Settings) -> FetchLimits:
    found = settings.limit
    return FetchLimits(found.snapshot_mib, found.snapshot_files, found.snapshot_keep_days, found.snapshot_total_mib)


def _foreground(found: Interactive | None, run: Run) -> Interactive | None:
    """The foreground without its submitter, if that is a process of another machine."""
    if found is None or found.client is None or found.client.boot_id == run.boot_id:
        return found
    return replace(found, client=None)


_KEEP = 32
_KEEP_BYTES = 1 << 20


class PayloadCache:
    """The most recently used small payloads: thousands of jobs of one sweep share two."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: OrderedDict[str, bytes] = OrderedDict()

    def get(self, sha: str) -> bytes:
        """The payload with this SHA-256. Raises: KeyError if the table does not have it."""
        body = self._kept.get(sha)
        if body is not None:
            self._kept.move_to_end(sha)
            return body
        body = self._store.payload(sha)
        if len(body) <= _KEEP_BYTES:
            self._kept[sha] = body
            if len(self._kept) > _KEEP:
                self._kept.popitem(last=False)
        return body


class CannotStart(Exception):
    """A run that can never be started; the message says why."""


class RunTickets:
    """Makes the tickets of runs: of a gang, one that contains those of its other nodes."""

    def __init__(self, cluster: ClusterNodes, store: Store) -> None:
        self._cluster = cluster
        self._store = store
        self._payloads = PayloadCache(store)
        self.spare_folders: deque[tuple[int, str]] = deque(maxlen=_KEEP)
        """Checkpoint folders of jobs that have COMPLETED on the daemon's machine, the latest ones, with their users."""

    def _spare_folder(self, job: Job, run: Run) -> str | None:
        spares = self.spare_folders
        if not spares or spares[-1][0] != job.uid or run.number > 1:
            return None
        # Nodes of a gang may share the folder: one that has it already must not lose it to another's.
        return spares.pop()[1] if run.nodes == (self._cluster.head.name,) else None

    def make(
        self,
        job: Job,
        run: Run,
        settings: Settings,
        containers: ContainerHost | None,
        handover: Handover | None = None,
    ) -> Ticket:
        """Everything the engine needs to start a run. Raises: CannotStart."""
        launch = job.spec.launch
        try:
            script = None if launch.script_sha is None else self._payloads.get(launch.script_sha)
            environment = self._payloads.get(launch.env_sha)
        except KeyError:
            raise CannotStart("its script or environment is missing from the database") from None
        past = past_environment(job, run, self._store)
        if run.native is not None:
            try:
                return handover_ticket(job, run, script, environment, settings, past, handover)
            except Refused as error:
                raise CannotStart(error.message) from None
        tickets = []
        for rank in started_parts(job, run):
            here = run.on(rank)
            node = self._cluster[here.node]
            index_of = {uuid: sample.index for uuid, sample in node.samples.items()}
            container = None
            is_held = bool(run.parts) and run.parts[rank].holds
            if launch.image is not None and containers is not None and not is_held:
                container = containers.launch_of(job, here, settings, node.reading)
            if isinstance(container, str):
                raise CannotStart(container)
            ticket = make_ticket(
                *(job, here, script, environment, node.site, settings, index_of, past),
                limits=node.limiter.known(run.id),
                rank=rank,
                master=self._cluster[run.node].address,
                lost_after_s=lease_of(job, here.node, self._cluster.head.name),
                container=container,
                variable=CUDA_VARIABLE if node.reading is None else node.reading.variable,
                spare_folder=self._spare_folder(job, run),
            )
            tickets.append(holding(ticket) if is_held else ticket)
        first, *peers = tickets
        return replace(first, peers=tuple(peers)) if peers else first
