"""What a watch tells in a tick that is dropped is told with the next one that is recorded: once, never twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from lab import ANN, BOB, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon import budgets as budgets_module
from gpusched.daemon.commit import TickTransaction
from gpusched.daemon.watch.burst import Handovers
from gpusched.model.cluster import HostSample
from gpusched.model.job import Alerting
from gpusched.model.queue_settings import AccountSettings
from gpusched.model.settings import (
    AlertSettings,
    BudgetSettings,
    FaultSettings,
    GpuSettings,
    IdleSettings,
    QueueSettings,
)
from gpusched.model.tariff import Tariff, TariffRow
from gpusched.ports.tables import ALERTS, DRAINS
from gpusched.testing import request

GIB = 1024
LONG = SimulatedOutcome(runs_s=1e7, stop_takes_s=1)
TO_ADMIN = AlertSettings(admin=("ops",), unreachable_s=60)


@dataclass
class Case:
    """A lab at the brink of telling something."""

    lab: Lab
    bring_about: Callable[[], object]
    """What makes the next ticks tell it."""
    told: Callable[[], list[str]]
    """What has been told, as recorded."""
    waits_s: float = 5.0
    """Between two of three ticks in which it is told."""
    call_off: Callable[[], object] = field(default=lambda: None)
    """What ends its cause, if it is to be told all the same."""


def alerts(lab: Lab, event: str) -> list[str]:
    return [one.key for one in lab.store.load(ALERTS).values() if one.event == event]


def story(lab: Lab, kind: str, says: str = "") -> list[str]:
    jobs = range(1, lab.scheduler.state.next_id)
    return [one.text for job in jobs for one in lab.store.events(job) if one.kind == kind and says in one.text]


def gpus(**parts: Any) -> GpuSettings:
    return GpuSettings(**{"free_polls": 1, **parts})


def full_node() -> Case:
    lab = Lab(alert=TO_ADMIN)
    host = lab.scheduler.head.host
    assert isinstance(host, HostSample)
    return Case(
        lab,
        lambda: lab.scheduler.observe_host(host, "node n1 has no space left on /spool"),
        lambda: alerts(lab, "node_full"),
    )


def full_node_for_a_while() -> Case:
    case = full_node()
    host = case.lab.scheduler.head.host
    assert host is not None
    return replace_case(case, lambda: case.lab.scheduler.observe_host(host))


def replace_case(case: Case, call_off: Callable[[], object]) -> Case:
    return Case(case.lab, case.bring_about, case.told, case.waits_s, call_off)


def silent_node(what: Callable[[Lab], list[str]]) -> Case:
    lab = Lab(outcome=LONG, more_nodes=("n2",), alert=TO_ADMIN)
    lab.scheduler.outages.be_members({"n1", "n2"})
    lab.submit(request=request(1, nodelist=("n2",)), alerting=Alerting(("node_unreachable",)))
    lab.tick(1)
    return Case(
        lab,
        lambda: lab.scheduler.outages.see("n2", "node n2 has not answered", lab.clock.now()),
        lambda: what(lab),
        waits_s=61,
    )


def overuse(what: Callable[[Lab], list[str]], booked_gib: int = 8, held_gib: int = 20) -> Case:
    lab = Lab(gpus=1, outcome=LONG, gpu=gpus(vram_over="warn"))
    for _ in range(2):
        lab.submit(request=request(1, vram_mib=booked_gib * GIB), alerting=Alerting(("vram_over",)))
    lab.tick(1)
    return Case(lab, lambda: lab.held.update({"1.1": (0, held_gib * GIB)}), lambda: what(lab), waits_s=10)


def intrusion(what: Callable[[Lab], list[str]]) -> Case:
    lab = Lab(outcome=LONG)
    for _ in range(2):
        lab.submit(request=request(1), alerting=Alerting(("gpu_unbooked", "gpu_intruder")))
    lab.tick(1)
    return Case(lab, lambda: lab.held.update({"1.1": (1, 20 * GIB)}), lambda: what(lab), waits_s=20)


def idle() -> Case:
    lab = Lab(outcome=LONG, idle=IdleSettings(after_s=60, window_s=10))
    lab.load = {0: 1.0}
    lab.submit(request=request(1), alerting=Alerting(("gpu_idle",)))
    lab.tick(1)
    return Case(
        lab, lambda: lab.load.update({0: 0.0}), lambda: alerts(lab, "gpu_idle") + story(lab, "idle"), waits_s=30
    )


def budget() -> Case:
    account = AccountSettings("vision", gpu_hours=1.0, users={"ann": 1.0})
    lab = Lab(outcome=LONG, account={"vision": account}, budget=BudgetSettings(alert_at=(50.0,)))
    lab.submit(request=request(1), account="vision", time_limit_s=3600)
    lab.tick(1)
    return Case(lab, lambda: lab.clock.advance(2000), lambda: alerts(lab, "budget"), waits_s=61)


def power_cap() -> Case:
    lab = Lab(outcome=LONG, queue={"default": QueueSettings("default", power_cap_w=200)})
    lab.submit(request=request(1))
    return Case(
        lab,
        lambda: lab.health.update({0: {"power_cap_w": 200.0}}),
        lambda: story(lab, "note", "power limit") + [run for run in lab.engine._runs if run != "1.1"],
    )


def fault() -> Case:
    lab = Lab(outcome=LONG, alert=TO_ADMIN)
    lab.submit(request=request(1))
    lab.tick(1)
    return Case(lab, lambda: lab.xids.update({0: (95,)}), lambda: list(lab.store.load(DRAINS)))


def failed_soon() -> Case:
    lab = Lab(gpus=1, outcome=SimulatedOutcome(runs_s=2, exit_code=1), fault=FaultSettings(early_users=2))
    lab.ask(lab.submission(ANN, request=request(1)))
    for _ in range(4):
        lab.tick(2)
    lab.ask(lab.submission(BOB, request=request(1)))
    lab.tick(1)
    return Case(lab, lambda: None, lambda: list(lab.store.load(DRAINS)))


def limit_alert() -> Case:
    lab = Lab(outcome=LONG)
    lab.submit(request=request(1), time_limit_s=1000, alerting=Alerting(("time_limit_80",)))
    lab.tick(1)
    return Case(lab, lambda: lab.clock.advance(810), lambda: alerts(lab, "time_limit_80"), waits_s=1)


def end_alert() -> Case:
    lab = Lab(outcome=SimulatedOutcome(runs_s=10))
    lab.submit(request=request(1), alerting=Alerting(("end",)))
    lab.tick(1)
    return Case(lab, lambda: None, lambda: alerts(lab, "end"), waits_s=10)


def tariff_of(now: float, *prices: float) -> Tariff:
    rows = tuple(TariffRow(now + hour * 3600.0, price, None) for hour, price in enumerate(prices))
    return Tariff(None, None, "EUR", 1.0, rows, now + 3600.0 * len(prices))


def cheap_start() -> Case:
    lab = Lab(outcome=LONG)
    now = lab.clock.now()
    lab.scheduler.use_tariff(tariff_of(now, 0.4, 0.1, 0.4, 0.4, 0.4), None)
    lab.submit(request=request(1), time_limit_s=3600, deadline_at=now + 5 * 3600, start_when="cheap")
    lab.tick(1)
    return Case(
        lab,
        lambda: lab.scheduler.use_tariff(tariff_of(now, 0.4, 0.3, 0.3, 0.1, 0.4), None),
        lambda: story(lab, "note", "put off"),
    )


CASES: dict[str, Callable[[], Case]] = {
    "a full node": full_node,
    "a node that was full until the table could be written": full_node_for_a_while,
    "a silent node, to admins": lambda: silent_node(lambda lab: alerts(lab, "node_down")),
    "a silent node, to owners": lambda: silent_node(lambda lab: alerts(lab, "node_unreachable")),
    "a silent node, in the story": lambda: silent_node(lambda lab: story(lab, "note", "has not answered")),
    "overuse, to the owner": lambda: overuse(lambda lab: alerts(lab, "vram_over")),
    "overuse, in the story": lambda: overuse(lambda lab: story(lab, "vram")),
    "overuse, in the story of a neighbour": lambda: overuse(lambda lab: story(lab, "crowded"), 38, 60),
    "unbooked use, to the owner": lambda: intrusion(lambda lab: alerts(lab, "gpu_unbooked")),
    "unbooked use, in the story": lambda: intrusion(lambda lab: story(lab, "unbooked")),
    "an intruder, to the owner": lambda: intrusion(lambda lab: alerts(lab, "gpu_intruder")),
    "an intruder, in the story": lambda: intrusion(lambda lab: story(lab, "intruder")),
    "a budget": budget,
    "the outcome of a power cap": power_cap,
    "a fault": fault,
    "a suspect card": failed_soon,
    "a time limit": limit_alert,
    "an end": end_alert,
    "a cheaper start": cheap_start,
}


@pytest.fixture(autouse=True)
def known_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets_module.pwd, "getpwnam", lambda name: SimpleNamespace(pw_uid=1000))


def turns(case: Case) -> None:
    for _ in range(3):
        case.lab.tick(case.waits_s)


@pytest.mark.parametrize("name", CASES)
def test_it_is_told_once_if_nothing_fails(name: str) -> None:
    case = CASES[name]()
    assert case.told() == []
    case.bring_about()
    turns(case)
    case.call_off()
    turns(case)
    assert len(case.told()) == 1


@pytest.mark.parametrize("name", CASES)
def test_it_is_told_once_after_a_commit_that_failed(name: str) -> None:
    case = CASES[name]()
    case.lab.store.is_full = True
    case.bring_about()
    turns(case)
    assert case.lab.scheduler.trouble == "the disk is full"
    assert case.told() == []
    case.call_off()
    case.lab.store.is_full = False
    case.lab.tick(0.5)
    case.lab.tick(0.5)
    assert len(case.told()) == 1
    turns(case)
    assert len(case.told()) == 1


@pytest.mark.parametrize("name", CASES)
def test_it_is_told_once_if_something_else_raises_in_that_tick(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]()
    raised: list[None] = []

    def hand_over(self: Handovers, tx: TickTransaction) -> None:
        if tx.changes or tx.news or tx.messages or case.lab.scheduler.alerts._admin:
            raised.append(None)
            raise KeyError("a bug")

    monkeypatch.setattr(Handovers, "carry_out", hand_over)
    case.bring_about()
    turns(case)
    case.call_off()
    turns(case)
    assert raised
    assert len(case.told()) == 1
