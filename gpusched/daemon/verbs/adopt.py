"""Turn a GPU process without a job into a job: identify it, check rights, and book what it holds.

`examine` reads the process and its descendants once; the command checks the result against the queue and
records the job, which runs at once. From then on its supervisor watches it (`engine.supervisor.adopted`).
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterable
from typing import Any

from gpusched.access import check_admin, hides, is_admin
from gpusched.daemon.commit import AuditEvent, TickTransaction
from gpusched.daemon.verbs.admission import check_nice, check_submission, complete_all, with_auto_limits
from gpusched.daemon.verbs.submit import check_room, check_stored, record
from gpusched.engine.linux import proctree
from gpusched.errors import Forbidden, NotFound, Refused
from gpusched.lifecycle import run_transitions
from gpusched.lifecycle.foreign import is_of_the_system
from gpusched.lifecycle.transitions import new_job
from gpusched.model.cluster import GpuReading, JobTerms
from gpusched.model.commands import Adopt, AdoptableProcess, Caller, OccupiedGpu
from gpusched.model.job import AdoptedProcess, GpuShare, Job, JobEvent, JobSpec, split_run_id
from gpusched.model.mentions import mention_job
from gpusched.model.settings import Settings
from gpusched.model.snapshot import Placement
from gpusched.model.units import format_size_mib, gpu_label, gpu_list, printable
from gpusched.ports import Engine
from gpusched.scheduler.infeasible import format_size_floor
from gpusched.scheduler.preemption import held_by_job
from gpusched.scheduler.quota import Quotas
from gpusched.scheduler.usage import demand

_LONGEST_COMMAND = 1 << 16
"""Bytes of a command line to keep."""
_MOST_PROCESSES = 4096
_SEE = "see who is on a GPU with: ginfo --foreign"


def check_who(caller: Caller, settings: Settings) -> None:
    """Refuse owners if `[foreign] adopt` reserves adoption for admins. Raises: Forbidden."""
    if settings.foreign.adopt == "admin":
        check_admin(caller, "adopt processes here", settings)


def check_rights(pid: int, caller: Caller, is_an_admin: bool) -> tuple[proctree.Process, int, str]:
    """The process, and its owner's uid and name. Raises: NotFound, Forbidden, Refused."""
    process = proctree.read_process(pid)
    uid = proctree.real_uid(pid)
    if process is None or uid is None or not process.is_alive:
        raise NotFound(f"there is no process {pid}", _SEE)
    user = _user_of(uid)
    if uid != caller.uid and not is_an_admin:
        raise Forbidden(
            f"process {pid} belongs to {user}, not to {caller.user}", f"let {user} type: gpusched adopt {pid}"
        )
    if uid != os.geteuid() and os.geteuid() != 0:
        raise Refused(
            f"process {pid} belongs to {user}, and this daemon can adopt only processes of the user it runs as", _SEE
        )
    if proctree.has_other_rights(pid):
        # Root would read and show data that the process's owner must not see.
        raise Refused(f"process {pid} ({printable(process.name)}) has rights that are not {user}'s", _SEE)
    return process, uid, user


def examine(pid: int, caller: Caller, is_an_admin: bool, reading: GpuReading | None, boot_id: str) -> AdoptableProcess:
    """Read the process and its descendants, of which there may be many: call this on another thread.

    Raises: NotFound, Forbidden, Refused.
    """
    process, uid, user = check_rights(pid, caller, is_an_admin)
    argv = _command(pid)
    if not argv:
        raise Refused(f"process {pid} ({printable(process.name)}) is a kernel thread", _SEE)
    if is_of_the_system(process.name):
        raise Refused(f"process {pid} ({printable(process.name)}) is a system or display service", _SEE)
    below = proctree.descendants(pid)
    if os.getpid() in below or os.getpid() == pid:
        raise Refused(f"process {pid} is, or has started, the scheduler's daemon", _SEE)
    # Descendants that run as other users are not part of the run, and their GPUs are not booked.
    tree = frozenset({pid, *(one for one in below if proctree.real_uid(one) == uid)})
    if len(tree) > _MOST_PROCESSES:
        raise Refused(f"process {pid} has more than {_MOST_PROCESSES} running descendants", _SEE)
    cards = _cards(tree, reading, pid)
    own = [process for gpu in (reading.gpus if reading else ()) for process in gpu.processes or ()]
    if process.session == pid and pid not in {one.pid for one in own}:
        there = min(one.pid for one in own if one.pid in tree)
        raise Refused(
            f"process {pid} ({printable(process.name)}) leads a session and is not on a GPU itself: a login shell, "
            "or whatever else runs in it, must not end with a job",
            f"adopt what is on the GPU: gpusched adopt {there}",
        )
    if caller.pid == pid or caller.pid in below:
        raise Refused(f"process {pid} is an ancestor of this command, which would end with the job", _SEE)
    return AdoptableProcess(
        process=AdoptedProcess(pid, process.start_ticks, boot_id),
        uid=uid,
        user=user,
        name=process.name,
        argv=argv,
        work_dir=_link(f"/proc/{pid}/cwd") or "/",
        output=_output(pid),
        cards=cards,
        tree=tree,
        above=_ancestors(process),
    )


def _cards(tree: frozenset[int], reading: GpuReading | None, pid: int) -> tuple[OccupiedGpu, ...]:
    if reading is None or reading.error is not None:
        why = "the GPUs have not been read yet" if reading is None else reading.error
        raise Refused(f"cannot tell which GPUs process {pid} is on: {why}", "see: gpusched doctor")
    found = []
    for gpu in reading.gpus:
        held = [process.vram_mib for process in gpu.processes or () if process.pid in tree]
        # If MIG divides the GPU, its instances are booked instead.
        if held and not gpu.mig_enabled:
            known = [mib for mib in held if mib is not None]
            total_mib = None if gpu.vram_total_mib is None else gpu.vram_total_mib - gpu.vram_reserved_mib
            used_mib = sum(known) if len(known) == len(held) else None
            found.append(OccupiedGpu(gpu.uuid, gpu.index, total_mib, used_mib))
    if found:
        return tuple(found)
    # A lost GPU reports no processes, but cannot be in use.
    blind = [gpu_label(gpu.index) for gpu in reading.gpus if gpu.processes is None and not gpu.is_lost]
    if blind:
        text = f"the driver does not report which processes are on GPU {', '.join(blind)}"
        raise Refused(f"cannot tell whether process {pid} is on a GPU: {text}", "see: gpusched doctor")
    raise Refused(f"neither process {pid} nor any of its descendants is on a GPU", _SEE)


def check_is_no_job(pid: int, engine: Engine) -> None:
    """Refuse a process that belongs to a job. Raises: Refused."""
    run = engine.owners([pid]).get(pid)
    if run is not None:
        raise _is_job(pid, str(split_run_id(run)[0]))


def _is_job(pid: int, job: str, root: int | None = None) -> Refused:
    what = f"process {pid}" if root is None else f"process {pid}, which process {root} has started,"
    return Refused(f"{what} is part of job {job} already", f"see it with: gshow {job}")


def _user_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        raise Refused(f"its owner is uid {uid}, and this machine has no user with that id", _SEE) from None


def _command(pid: int) -> tuple[str, ...]:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            data = file.read(_LONGEST_COMMAND)
    except OSError:
        return ()
    return tuple(os.fsdecode(word) for word in data.rstrip(b"\0").split(b"\0")) if data.strip(b"\0") else ()


def _link(path: str) -> str | None:
    """Target of a /proc link; None if it is hidden or was removed since."""
    try:
        target = os.readlink(path)
    except OSError:
        return None
    return target if target.startswith("/") and not target.endswith(" (deleted)") else None


def _output(pid: int) -> str:
    path = f"/proc/{pid}/fd/1"
    target = _link(path)
    try:
        is_file = stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        is_file = False
    return target if target is not None and is_file else os.devnull


def _ancestors(process: proctree.Process) -> frozenset[int]:
    found: set[int] = set()
    at: proctree.Process | None = process
    while at is not None and at.ppid > 1 and at.ppid not in found:
        found.add(at.ppid)
        at = proctree.read_process(at.ppid)
    return frozenset(found)


def apply(command: Adopt, tx: TickTransaction) -> dict[str, Any]:
    """Record the job and its only run. Raises: UserError, with nothing of this command applied."""
    found, caller, settings = command.found, command.caller, tx.settings
    check_who(caller, settings)
    if found.uid != caller.uid and not is_admin(caller, settings):
        # The caller was an admin when the process was examined.
        raise Forbidden(f"process {found.process.pid} belongs to {found.user}, not to {caller.user}", _SEE)
    owner = Caller(found.uid, found.user, caller.pid)
    _check_is_apart(found, (tx.state.jobs[run.job_id] for run in tx.state.open_runs.values()))
    check_room(1, owner, tx)
    check_nice(command.spec.nice, command.spec.queue, caller, settings)
    specs, (limit,) = with_auto_limits([command.spec], found.user, tx)
    (spec,) = complete_all(specs, owner, tx)
    check_submission([spec], owner, tx)
    check_stored(command.payloads, owner, tx)
    shares = tuple(_share(card, spec, tx, caller, found) for card in found.cards)
    _check_limits(spec, found, tx)
    # Processes of the daemon's own machine, the first node.
    node = tx.nodes[0]
    placement = Placement(node.name, shares, 0.0, 0)
    _check_host_memory(placement, found, tx)
    job = new_job(tx.state.next_id, owner, spec, tx.now)
    tx.state.next_id = job.last_id + 1
    by = f"by {caller.user}" if caller.uid == found.uid else f"by {caller.user} for {found.user}"
    record(job, f"process {found.process.pid} ({printable(found.name)}) was adopted {by}{limit and f'; {limit}'}", tx)
    boot_ids = {node.name: found.process.boot_id}
    job, run, _ = run_transitions.start_run(job, placement, boot_ids, tx.now, found.output, None)
    where = gpu_list(share.index for share in shares)
    tx.put(job, run, [JobEvent(job.id, tx.now, "started", f"runs on {node.name}, GPU {where}", run.number)])
    tx.changes.payloads.update(command.payloads)
    if caller.uid != found.uid:
        target = f"process {found.process.pid}, now job {job.id}"
        tx.audit_events.append(AuditEvent(caller, "adopt", target, found.user))
    return {"id": str(job.id), "gpus": [share.index for share in shares], "uuids": [share.uuid for share in shares]}


def _check_is_apart(found: AdoptableProcess, jobs: Iterable[Job]) -> None:
    """Refuse a process tree that overlaps an adopted job, as with two requests at once. Raises: Refused."""
    pid = found.process.pid
    for job in jobs:
        adopted = job.spec.adopted
        if adopted is None or not proctree.lives(adopted.pid, adopted.start_ticks):
            continue
        if adopted.pid == pid or adopted.pid in found.above:
            raise _is_job(pid, job.shown_id)
        if adopted.pid in found.tree:
            raise _is_job(adopted.pid, job.shown_id, pid)


def _check_limits(spec: JobSpec, found: AdoptableProcess, tx: TickTransaction) -> None:
    """Refuse a process whose job would exceed limits of its queue or QOS. Raises: Refused."""
    layout = tx.layout()
    quotas = Quotas(tx.settings, layout)
    for held in held_by_job(layout, tx.state.holds.values()).values():
        quotas.add(held.first.terms, held.amount)
    terms = JobTerms(found.uid, found.user, spec.account, spec.queue, spec.qos)
    denial = quotas.why_not(terms, demand(layout, spec.request))
    if denial is not None:
        raise Refused(
            f"process {found.process.pid} cannot be a job now: {denial.text}",
            "end another job first, or name another queue (-q) or QOS (--qos)",
        )


def _check_host_memory(placement: Placement, found: AdoptableProcess, tx: TickTransaction) -> None:
    """Refuse GPUs that use host memory if jobs have booked too much of it. Raises: Refused."""
    layout = tx.layout()
    wanted_mib = layout.node_mem_mib(placement)
    left_mib = sum(layout.mem_mib) - sum(map(layout.node_mem_mib, tx.state.holds.values()))
    if wanted_mib > max(0, left_mib):
        left = format_size_floor(left_mib) if left_mib > 0 else "none"
        raise Refused(
            f"process {found.process.pid} cannot be a job now: its GPU uses host memory, of which {left} is left "
            f"to book, not {format_size_mib(wanted_mib)}",
            f"book a part of it with --vram, at most {left}" if left_mib > 0 else "wait until other jobs have ended",
        )


def _share(card: OccupiedGpu, spec: JobSpec, tx: TickTransaction, caller: Caller, found: AdoptableProcess) -> GpuShare:
    """The share to book. Raises: Refused if others booked the GPU or the process holds more than it would book."""
    wanted_mib = spec.request.vram_mib
    beside_mib = 0
    for hold in tx.state.holds.values():
        for share in hold.gpus:
            if share.uuid != card.uuid:
                continue
            if wanted_mib is not None and share.vram_mib is not None and hold.terms.uid == found.uid:
                beside_mib += share.vram_mib
                continue
            raise _booked(card, hold.job_id, tx, caller)
    if wanted_mib is None:
        return GpuShare(card.uuid, card.index)
    if card.used_mib is not None and card.used_mib > wanted_mib:
        raise Refused(
            f"process {found.process.pid} holds {format_size_mib(card.used_mib)} of GPU {gpu_label(card.index)} "
            f"already, more than the {format_size_mib(wanted_mib)} requested",
            f"book that much, or the whole card: gpusched adopt {found.process.pid}",
        )
    headroom_mib = tx.settings.gpu.share_headroom_mib
    if card.total_mib is not None and beside_mib + wanted_mib > card.total_mib - headroom_mib:
        left_mib = max(0, card.total_mib - headroom_mib - beside_mib)
        raise Refused(
            f"GPU {gpu_label(card.index)} has {format_size_mib(left_mib)} left to book, "
            f"not {format_size_mib(wanted_mib)}",
            "see what is booked with: ginfo",
        )
    return GpuShare(card.uuid, card.index, vram_mib=wanted_mib)


def _booked(card: OccupiedGpu, job_id: int, tx: TickTransaction, caller: Caller) -> Refused:
    job = tx.state.jobs.get(job_id)
    if job is None or hides(caller, job, tx.settings):
        return Refused(
            f"GPU {gpu_label(card.index)} is booked by another job", "wait until it has ended, or end the process"
        )
    return Refused(
        f"GPU {gpu_label(card.index)} is booked by {mention_job(job.shown_id, job.user)}",
        f"wait until it has ended, or end it first: gcancel {job.shown_id}",
    )


def wanted(found: AdoptableProcess, values: dict[str, Any]) -> dict[str, Any]:
    """Submission fields for the process: `values` are the fields the user has given."""
    return {
        "name": found.name or "process",
        "gpus": len(found.cards),
        "cpus": 0,
        "mem_mib": 0,
        **values,
        "argv": found.argv,
        "work_dir": found.work_dir,
        "stdout": found.output.replace("%", "%%"),
        "env": {},
        "requeue": False,
    }


def check_changes(job: Job, changes: dict[str, Any]) -> None:
    """Refuse changes that only another run could use. Raises: Refused."""
    if job.spec.adopted is None:
        return
    for name in ("retries", "fallback"):
        if changes.get(name):
            raise Refused(
                f"job {job.shown_id} was adopted while running and cannot be started again, so {name} does not apply",
                f"see it with: gshow {job.shown_id}",
            )
