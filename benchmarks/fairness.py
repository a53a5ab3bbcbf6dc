"""Made-up traces that show whether the order is fair between users, each with a goal.

two users      one GPU that a user keeps busy with half-hour jobs, and another user's two jobs of twelve hours
thirty users   a small cluster in everyday use, on which one of the users submits 2,000 short jobs at once
group shares   two accounts that always have jobs pending: one many short narrow jobs, the other a few long wide ones

Nobody gives a time limit. All is drawn from fixed seeds, so that every run of a case has the same jobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from random import Random
from statistics import mean, stdev

from benchmarks.cases import disturbed
from gpusched.addons.simulate import planner_run
from gpusched.addons.simulate.cluster import nodes_of
from gpusched.addons.simulate.outcome import USER, Outcome, groups
from gpusched.addons.simulate.policies import Policy
from gpusched.addons.simulate.trace import TraceJob
from gpusched.model.cluster import NodeView
from gpusched.model.queue_settings import AccountSettings
from gpusched.model.value import replace

HOUR_S = 3600
DAY_S = 86400

LIGHT_WAIT_S = 3 * HOUR_S
"""Longest wait of a job of the light user."""
GROWTH = 0.10
"""By at most this part of it another user's mean wait may grow when one user floods the queue."""
GROWTH_FLOOR_S = 120.0
"""A mean wait that grows by less than this has not grown: a run that has begun is not interrupted."""
SHARE_TOLERANCE = 0.10
"""By at most this part of it may what an account is served differ from what it is due."""

FLOODER = "user00"
FLOOD_JOBS, FLOOD_RUN_S = 2000, 600


@dataclass(frozen=True, slots=True)
class GoalResult:
    """One goal, and what a policy makes of it."""

    case: str
    figure: float
    goal: float
    """The figure is to be at most this."""
    shown: str
    """The figure, to be read."""
    text: str
    """All of it as a sentence."""

    @property
    def holds(self) -> bool:
        """Whether the goal is met."""
        return self.figure <= self.goal


def made(number: int, submit_s: float, run_s: float, gpus: int, user: str, account: str = "") -> TraceJob:
    length_s = max(1, round(run_s))
    return TraceJob(
        id=str(number),
        submit_s=round(submit_s),
        run_s=length_s,
        estimate_s=length_s,
        gpus=gpus,
        user=user,
        account=account,
    )


def simulated(jobs: Sequence[TraceJob], nodes: Sequence[NodeView], policy: Policy) -> Outcome:
    """The schedule of these jobs under a policy."""
    return planner_run.run(
        jobs, nodes, policy.settings, orders_by_run_time=policy.orders_by_run_time, predict=policy.predict
    )


# --- two users ------------------------------------------------------------------------------------


def two_users() -> tuple[list[TraceJob], tuple[NodeView, ...]]:
    """832 jobs of half an hour, one every 20 minutes, and two of 12 hours after one hour and after 2.3 days."""
    jobs = [made(number, number * 1200, 1800, 1, "heavy") for number in range(832)]
    jobs += [made(832 + number, at, 12 * HOUR_S, 1, "light") for number, at in enumerate((HOUR_S, 2.3 * DAY_S))]
    return jobs, nodes_of("1x1")


def judge_two_users(policy: Policy) -> GoalResult:
    """How long the light user waits."""
    jobs, nodes = two_users()
    outcome = simulated(jobs, nodes, policy)
    waits_s = [wait_s for job, wait_s in zip(jobs, outcome.wait_s, strict=True) if job.user == "light"]
    shown = " and ".join(f"{wait_s / HOUR_S:.1f} h" for wait_s in waits_s)
    longest = f"{max(waits_s) / HOUR_S:.1f} h"
    return GoalResult(
        "two users", max(waits_s), LIGHT_WAIT_S, longest, f"the light user's two jobs wait {shown}; goal: 3 h each"
    )


# --- thirty users ---------------------------------------------------------------------------------


def thirty_users(days: int = 14, load: float = 0.65) -> tuple[list[TraceJob], tuple[NodeView, ...]]:
    """Thirty users of 32 GPUs in four nodes: jobs of minutes to a working day on 1 to 8 GPUs, most in the afternoon.

    Args: load: part of the GPU time of all days that the jobs take.
    """
    dice, nodes = Random("thirty users"), nodes_of("4x8")
    drawn: list[tuple[float, float, int, str]] = []
    for number in range(30):
        typical_s = exp(dice.gauss(log(2400), 0.8))
        usual_gpus = dice.choices((1, 2, 4, 8), (70, 15, 10, 5))[0]
        a_day = dice.uniform(3, 10)
        for day in range(days):
            if day % 7 >= 5 and dice.random() < 0.6:
                continue  # a weekend off
            for _ in range(dice.randint(0, round(2 * a_day))):
                at = day * DAY_S + dice.gauss(14.5, 6.0) % 24 * HOUR_S
                gpus = usual_gpus if dice.random() < 0.8 else 1
                run_s = min(8.0 * HOUR_S, max(60.0, exp(dice.gauss(log(typical_s), 1.0))))
                drawn.append((at, run_s, gpus, f"user{number:02}"))
    room = sum(len(node.gpus) for node in nodes) * days * DAY_S
    stretch = load * room / sum(run_s * gpus for _, run_s, gpus, _ in drawn)
    drawn.sort()
    return [made(i, at, run_s * stretch, gpus, user) for i, (at, run_s, gpus, user) in enumerate(drawn)], nodes


def flood(at_s: float = DAY_S + 10 * HOUR_S) -> list[TraceJob]:
    """2,000 jobs of ten minutes that one of the thirty submits in a loop, within ten minutes."""
    return [made(1_000_000 + i, at_s + 0.3 * i, FLOOD_RUN_S, 1, FLOODER) for i in range(FLOOD_JOBS)]


def judge_thirty_users(policy: Policy, replays: int = 8) -> tuple[GoalResult, GoalResult]:
    """By how much the flood makes others wait longer: all of them together, and whoever's wait grows most.

    Figures are growths as parts of the mean wait without the flood, averaged over disturbed replays of the same trace.
    One user's few jobs wait as chance has it, so that a standard error is taken off the growth of a single user's
    wait; a growth within the floor counts as none.
    """
    jobs, nodes = thirty_users()
    before: dict[str, list[float]] = {}
    after: dict[str, list[float]] = {}
    for replay in range(replays):
        usual = disturbed(jobs, f"thirty users {replay}") if replay else jobs
        for waits, these in ((before, usual), (after, [*usual, *flood()])):
            for user, found in groups(simulated(these, nodes, policy), USER).items():
                waits.setdefault(user, []).append(found.wait_s)
    flood_s = mean(after.pop(FLOODER))
    del before[FLOODER]
    usual_s, flooded_s = (mean(map(mean, waits.values())) for waits in (before, after))
    together = GoalResult(
        "thirty users, together",
        flooded_s / usual_s - 1,
        GROWTH,
        f"{flooded_s / usual_s - 1:+.0%}",
        f"29 users wait {usual_s:,.0f} s on average, {flooded_s:,.0f} s beside the flood (it: {flood_s:,.0f} s); "
        f"goal: {GROWTH:.0%} more",
    )
    grown = {user: growth(before[user], after[user]) for user in before}
    worst = max(grown, key=lambda user: grown[user])
    harmed = sum(part > GROWTH for part in grown.values())
    each = GoalResult(
        "thirty users, each",
        grown[worst],
        GROWTH,
        f"{grown[worst]:+.0%}",
        f"{harmed} of {len(grown)} users wait over {GROWTH:.0%} longer beside the flood, most of all {worst}: "
        f"{mean(before[worst]):,.0f} to {mean(after[worst]):,.0f} s; goal: none",
    )
    return together, each


def growth(before_s: Sequence[float], after_s: Sequence[float]) -> float:
    """Growth of a mean wait as a part of it, less a standard error where several replays were made; at least 0."""
    differences_s = [after - before for before, after in zip(before_s, after_s, strict=True)]
    grown_s = mean(differences_s)
    if grown_s <= GROWTH_FLOOR_S:
        return 0.0
    error_s = stdev(differences_s) / sqrt(len(differences_s)) if len(differences_s) > 1 else 0.0
    return max(0.0, grown_s - error_s) / max(mean(before_s), 1.0)


# --- group shares ---------------------------------------------------------------------------------

NARROW, WIDE = "narrow", "wide"


def group_shares(days: int = 10) -> tuple[list[TraceJob], tuple[NodeView, ...]]:
    """Two accounts that each submit as much as 16 GPUs can do: half-hour jobs of one GPU; jobs of 4 or 8 for hours."""
    dice, nodes = Random("group shares"), nodes_of("2x8")
    room = sum(len(node.gpus) for node in nodes) * days * DAY_S
    jobs: list[TraceJob] = []

    def stream(account: str, users: int, mean_s: float, widths: Sequence[int]) -> None:
        offered = 0.0
        drawn = []
        while offered < room:
            run_s, gpus = mean_s * dice.uniform(0.5, 1.5), dice.choice(widths)
            offered += run_s * gpus
            drawn.append((run_s, gpus))
        # A tenth of it is pending from the beginning, so that neither account ever runs out of jobs.
        for place, (run_s, gpus) in enumerate(drawn):
            at = max(0.0, (place / len(drawn) - 0.1) / 0.9) * days * DAY_S
            jobs.append(made(len(jobs), at, run_s, gpus, f"{account}{dice.randrange(users)}", account))

    stream(NARROW, 4, 1800.0, (1,))
    stream(WIDE, 2, 6.0 * HOUR_S, (4, 8))
    return jobs, nodes


def judge_group_shares(policy: Policy, narrow: float = 1.0, wide: float = 1.0, days: int = 10) -> GoalResult:
    """How far what each account is served is from its part, after the first fifth of the time.

    Args: narrow, wide: shares of the accounts.
    """
    jobs, nodes = group_shares(days)
    users = {name: sorted({job.user for job in jobs if job.account == name}) for name in (NARROW, WIDE)}
    accounts = {
        name: AccountSettings(name, shares=shares, users=dict.fromkeys(users[name], 1.0))
        for name, shares in ((NARROW, narrow), (WIDE, wide))
    }
    settings = replace(policy.settings, account=accounts)
    outcome = simulated(jobs, nodes, replace(policy, settings=settings))
    served = served_gpu_s(outcome, days * DAY_S / 5, days * DAY_S)
    part, due = served[NARROW] / sum(served.values()), narrow / (narrow + wide)
    figure = max(abs(part / due - 1), abs((1 - part) / (1 - due) - 1))
    name = f"group shares {narrow:g}:{wide:g}"
    text = (
        f"short narrow jobs get {part:.0%} of the GPU time and are due {due:.0%}, long wide ones {1 - part:.0%} of "
        f"{1 - due:.0%}; goal: within {SHARE_TOLERANCE:.0%} of it"
    )
    return GoalResult(name, figure, SHARE_TOLERANCE, f"{part:.0%}, {1 - part:.0%}", text)


def served_gpu_s(outcome: Outcome, begin_s: float, end_s: float) -> dict[str, float]:
    """GPU seconds that the jobs of each account had between two instants."""
    found: dict[str, float] = {}
    for job, start_s, ended_s in zip(outcome.jobs, outcome.start_s, outcome.end_s, strict=True):
        seconds = max(0.0, min(ended_s, end_s) - max(start_s, begin_s))
        found[job.account] = found.get(job.account, 0.0) + seconds * job.gpus
    return found


_SHARES = ((1.0, 1.0), (2.0, 1.0), (1.0, 2.0))


def judge(policy: Policy, replays: int = 8, days: int = 10, only: str = "") -> Iterator[GoalResult]:
    """All of them whose names contain a word.

    Args:
        replays: of `thirty users`; on fewer than 8 chance has a part in what one of them waits.
        days: of `group shares`.
    """
    if only in "two users":
        yield judge_two_users(policy)
    if only in "thirty users":
        yield from judge_thirty_users(policy, replays)
    for narrow, wide in _SHARES:
        if only in f"group shares {narrow:g}:{wide:g}":
            yield judge_group_shares(policy, narrow, wide, days)
