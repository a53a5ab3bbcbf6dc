"""Builders for the tests of quotas: queues of eight GPUs, what they hold, who asks for more."""

from __future__ import annotations

from collections.abc import Mapping

from gpusched.model.cluster import JobTerms
from gpusched.model.queue_settings import QosSettings, QueueSettings
from gpusched.model.resources import Resources
from gpusched.model.settings import Settings
from gpusched.model.value import replace
from gpusched.scheduler.cluster_state import ClusterLayout
from gpusched.scheduler.limits import Denial
from gpusched.scheduler.quota import Quotas
from gpusched.testing import node, request

GIB = 1024
EIGHT_GPUS = [node(gpus=8, cpus=64.0, mem_mib=256 * GIB)]


def queue(name: str, parent: str | None = None, **parts: object) -> QueueSettings:
    return replace(QueueSettings(name, parent=parent), **parts)


def settings_of(*queues: QueueSettings, qos: Mapping[str, QosSettings] | None = None, **parts: object) -> Settings:
    made = Settings(queue={one.name: one for one in queues}, qos=qos or {})
    return replace(made, **parts)


def quotas_of(*queues: QueueSettings, held: Mapping[str, float] | None = None, **parts: object) -> Quotas:
    """Quotas of these queues on eight GPUs; `held` is GPUs by queue, in jobs of user zoe."""
    settings = settings_of(*queues, **parts)
    made = Quotas(settings, ClusterLayout(EIGHT_GPUS, settings))
    for name, gpus in (held or {}).items():
        made.add(terms(name, "zoe"), amount(gpus))
    return made


def amount(gpus: float = 0.0, cpus: float = 0.0, mem_mib: float = 0.0) -> Resources:
    return Resources(gpus=gpus, cpus=cpus, mem_mib=mem_mib)


def terms(name: str = "vision", user: str = "ann", qos: str = "") -> JobTerms:
    return JobTerms(1000, user, "lab", name, qos, request())


def denied(quotas: Quotas, needed: Resources, **where: str) -> Denial:
    found = quotas.why_not(terms(**where), needed)
    assert found is not None
    return found
