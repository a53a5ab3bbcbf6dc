"""Which jobs may preempt at all, by the settings alone, and why one that goes first preempts nothing."""

from __future__ import annotations

from collections.abc import Iterable

from gpusched.model.settings import Settings
from gpusched.scheduler.priority import tier_of


def may_preempt(settings: Settings) -> bool:
    """Whether runs can be preempted: by another QOS, or by a queue that reclaims lent resources."""
    if settings.preempt.mode == "off":
        return False
    return lends(settings) or any(qos.preempts for qos in settings.qos.values())


def lends(settings: Settings) -> bool:
    """Whether queues lend guaranteed resources and reclaim them."""
    return settings.preempt.reclaim and any(
        queue.guaranteed_gpus or queue.guaranteed_cpus or queue.guaranteed_mem_mib or queue.cells
        for queue in settings.queue.values()
    )


def tiers_that_only_order(settings: Settings) -> tuple[str, str] | None:
    """The highest and the lowest QOS where tiers differ and no QOS preempts another; None otherwise."""
    if settings.preempt.mode == "off" or any(qos.preempts for qos in settings.qos.values()):
        return None
    by_tier = sorted(settings.qos.values(), key=lambda qos: (qos.tier, qos.name))
    if len(by_tier) < 2 or by_tier[0].tier == by_tier[-1].tier:
        return None
    return by_tier[-1].name, by_tier[0].name


def why_it_preempts_nothing(qos: str, running: Iterable[str], settings: Settings) -> str | None:
    """Why a job of this QOS preempts none of the running jobs of lower tiers, as a sentence with the setting to change.

    None if it goes before none of them, or may preempt one. Args: running: QOS of each running job.
    """
    below = sorted({name for name in running if tier_of(name, settings) < tier_of(qos, settings)})
    mine = settings.qos.get(qos)
    if mine is None or not below:
        return None
    if settings.preempt.mode == "off":
        return f'its QOS {qos} goes before {_jobs_of(below)}, and preempts none of them: [preempt] mode = "off"'
    listed = [name for name in below if name in mine.preempts]
    if any(settings.qos[name].preemptible for name in listed if name in settings.qos):
        return None
    text = f"its QOS {qos} goes before {_jobs_of(below)}, and preempts none of them: "
    if listed:
        return f"{text}[qos.{listed[0]}] has preemptible = false"
    named = [name for name in below if name in settings.qos]
    if not named:
        return f'{text}a job without a QOS cannot be preempted; [default] qos = "NAME" gives new jobs one'
    add = ", ".join(f'"{name}"' for name in (*mine.preempts, *named))
    return f"{text}an administrator can set preempts = [{add}] in [qos.{qos}]"


def _jobs_of(names: Iterable[str]) -> str:
    return " and ".join(f"jobs of QOS {name}" if name else "jobs without a QOS" for name in names)
