"""Accounts that always have jobs pending are served by their shares, whatever their jobs and users are like.

By the planner alone and by the daemon's whole tick, for the orders that go by shares before all else. What the order in
force makes of it is a goal of `benchmarks.fairness`.
"""

from __future__ import annotations

from random import Random

import pytest

from benchmarks.fairness import served_gpu_s, simulated
from gpusched.addons.simulate import daemon_run
from gpusched.addons.simulate.cluster import nodes_of
from gpusched.addons.simulate.planner_run import OWN_PREDICTION
from gpusched.addons.simulate.policies import Policy
from gpusched.addons.simulate.trace import TraceJob
from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.queue_settings import AccountSettings
from gpusched.model.settings import Settings
from gpusched.model.value import Value, replace

HOUR_S = 3600
SPAN_S = 120 * HOUR_S
MAX_WAIT_S = 2.0 * SPAN_S
"""Beyond it arrival counts more than shares."""
GPUS = 8
NODES = nodes_of(f"1x{GPUS}:64")

EASY = PrioritySettings(order="fairshare", max_wait_s=MAX_WAIT_S, backfill_by="limit")
ORDERS = {
    "fair share": EASY,
    "weights": replace(EASY, order="multifactor", weight_fairshare=100_000.0),
}


class Group(Value):
    """What the users of an account have pending from the beginning."""

    mean_s: float
    widths: tuple[int, ...] = (1,)
    users: int = 2

    def jobs(self, account: str, first: int) -> list[TraceJob]:
        """More than the machine can do in the time, numbered from `first`."""
        dice, made, offered = Random(account), list[TraceJob](), 0.0
        while offered < 1.2 * SPAN_S * GPUS:
            run_s, gpus = round(self.mean_s * dice.uniform(0.5, 1.5)), dice.choice(self.widths)
            offered += run_s * gpus
            user = f"{account}{dice.randrange(self.users)}"
            made.append(TraceJob(str(first + len(made)), 0, run_s, run_s, gpus=gpus, user=user, account=account))
        return made


GROUPS = {
    "alike": (Group(HOUR_S), Group(HOUR_S)),
    "short and long": (Group(1800), Group(6 * HOUR_S)),
    "long and short": (Group(6 * HOUR_S), Group(1800)),
    "one user and ten": (Group(HOUR_S, users=1), Group(HOUR_S, users=10)),
    "narrow and whole nodes": (Group(HOUR_S), Group(HOUR_S, widths=(GPUS,))),
    "short wide and long narrow": (Group(1800, widths=(2, 4)), Group(4 * HOUR_S, users=5)),
    "long wide and short narrow": (Group(4 * HOUR_S, widths=(4,)), Group(1800, users=5)),
}


def part_of_first(
    groups: tuple[Group, Group],
    priority: PrioritySettings,
    shares: tuple[float, float] = (1.0, 1.0),
    *,
    tick: bool = False,
) -> float:
    """What the first account has had of all GPU time, after a fifth of the time."""
    jobs = groups[0].jobs("a", 0)
    jobs += groups[1].jobs("b", len(jobs))
    accounts = {
        name: AccountSettings(name, shares=share, users={"*": 1.0}) for name, share in zip("ab", shares, strict=True)
    }
    settings = Settings(priority=priority, account=accounts)
    outcome = (
        daemon_run.run(jobs, NODES, settings)
        if tick
        else simulated(jobs, NODES, Policy("x", settings, predict=OWN_PREDICTION))
    )
    last_s = {
        name: max(start_s for job, start_s in zip(jobs, outcome.start_s, strict=True) if job.account == name)
        for name in "ab"
    }
    assert min(last_s.values()) >= SPAN_S, "an account ran out of jobs"
    served = served_gpu_s(outcome, SPAN_S / 5, SPAN_S)
    return served["a"] / sum(served.values())


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_equal_shares_get_equal_service_between(groups: tuple[Group, Group]) -> None:
    assert part_of_first(groups, ORDERS["weights"]) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("what", ["short and long", "one user and ten", "narrow and whole nodes"])
@pytest.mark.parametrize("order", ORDERS)
def test_three_shares_get_three_times_the_service_of_one_between(what: str, order: str) -> None:
    assert part_of_first(GROUPS[what], ORDERS[order], (3.0, 1.0)) == pytest.approx(0.75, rel=0.05)


@pytest.mark.parametrize(
    "what", ["narrow and whole nodes", pytest.param("short wide and long narrow", marks=pytest.mark.nightly)]
)
def test_the_daemon_tick_divides_the_machine_by_shares_between(what: str) -> None:
    assert part_of_first(GROUPS[what], ORDERS["fair share"], tick=True) == pytest.approx(0.5, rel=0.1)


def test_without_a_share_weight_arrival_divides_the_machine() -> None:
    """So that the tests above are of shares, not of the jobs."""
    part = part_of_first(GROUPS["short and long"], PrioritySettings(order="multifactor", weight_fairshare=0.0))
    assert part != pytest.approx(0.5, rel=0.2)
