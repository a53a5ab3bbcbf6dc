"""What one is told to change so that a waiting job starts now. Every answer is checked by a plan of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from scenario import HOUR, MINUTE, Scenario, running, settings, wants
from support import patches_the_planner

from gpusched.model.cluster import JobTerms
from gpusched.model.queue_settings import QueueSettings
from gpusched.model.settings import Settings
from gpusched.model.snapshot import ClassKey, PendingClass, Placement, Snapshot, Window
from gpusched.model.value import replace
from gpusched.scheduler.planner import Planner, decide
from gpusched.scheduler.whatif import BUDGET, Alternative, SensibleLimit, alternatives, format_limit
from gpusched.testing import NOW, gpu_view, node, share

TWO_QUEUES = replace(Settings(), queue={"default": QueueSettings("default"), "small": QueueSettings("small")})

FIELDS = {"gpus_linked": "is_linked", "exclusive": "is_exclusive", "gpus_per_node": "gpus"}
"""Names in a Request of fields of a submission."""


def mixed() -> Any:
    cards = [gpu_view(0), gpu_view(1), gpu_view(2, name="Tesla T4", vram_total_mib=16 * 1024)]
    return node(gpus=cards)


UNKNOWN = " (if that is long enough: too few jobs like it have ended to tell)"
KNOWN = "95 % of 34 jobs like it took at most 1:40:00"
HUNDRED_MINUTES = SensibleLimit(100 * MINUTE, 2 * HOUR, KNOWN)


@dataclass(frozen=True)
class Case:
    scenario: Scenario
    helps: list[str]
    """Texts after "would start now ", in order."""
    job_id: int = 1
    sensible: SensibleLimit | None = None


def before_a_wide_job(ends_in: float, limit: float | None) -> Scenario:
    """Job 2 wants one of two cards; job 1, which goes first, both of them as soon as the other one is free."""
    wishes = [wants(1, 2, limit=HOUR), wants(2, 1, limit=limit)]
    return Scenario([node(gpus=2)], wishes, [running(9, "n1:0", ends_in=ends_in)])


CASES = {
    "a job that starts anyway needs no help": Case(Scenario([node(gpus=1)], [wants(1, 1)]), []),
    "fewer GPUs than the two that are asked for": Case(
        Scenario([node(gpus=2)], [wants(1, 2)], [running(9, "n1:0", ends_in=HOUR)]), ["with -g 1"]
    ),
    "as many GPUs as are free": Case(
        Scenario([node(gpus=8)], [wants(1, 8)], [running(9, "n1:0", ends_in=HOUR)]), ["with -g 7"]
    ),
    "the type is kept when the number is what is too large": Case(
        Scenario([mixed()], [wants(1, 2, gpu_type="a100")], [running(9, "n1:0")]), ["with -g a100:1"]
    ),
    "another type of which there is one free": Case(
        Scenario([mixed()], [wants(1, 1, gpu_type="a100")], [running(9, "n1:0,1")]), ["with -g t4:1"]
    ),
    "beside others on the node": Case(
        Scenario([node(gpus=1)], [wants(1, 1, is_exclusive=True)], [running(9, "n1")]), ["without --exclusive"]
    ),
    "on a node that was left out": Case(
        Scenario(
            [node("n1", gpus=1), node("n2", gpus=1)],
            [wants(1, 1, nodelist=("n1",))],
            [running(9, "n1:0")],
        ),
        ["without -w n1"],
    ),
    "without the label that only a busy node has": Case(
        Scenario(
            [node("n1", gpus=1, labels=("nvlink",)), node("n2", gpus=1)],
            [wants(1, 1, constraint="nvlink")],
            [running(9, "n1:0")],
        ),
        ["without -C 'nvlink'"],
    ),
    "fewer nodes, or fewer cards on each": Case(
        Scenario(
            [node("n1", gpus=2), node("n2", gpus=2)],
            [wants(1, 2, nodes=2)],
            [running(9, "n1:0")],
        ),
        ["with --gpus-per-node 1", "with -N 1 --gpus-per-node 2"],
    ),
    "nothing helps when every card is taken": Case(
        Scenario([node(gpus=2)], [wants(1, 1, limit=HOUR)], [running(8, "n1:0"), running(9, "n1:1")]), []
    ),
    "a shorter time limit fits before what is kept for the first": Case(
        Scenario(
            [node(gpus=2)],
            [wants(1, 2, limit=HOUR), wants(2, 1, limit=3 * HOUR)],
            [running(9, "n1:0", ends_in=2 * HOUR)],
        ),
        ["with -t 1h55m" + UNKNOWN],
        job_id=2,
    ),
    "of a job that nobody knows, less than half of what it asks for is not proposed": Case(
        before_a_wide_job(2 * HOUR, 5 * HOUR), [], job_id=2
    ),
    "a limit that jobs like it keep, and no longer one": Case(
        before_a_wide_job(6 * HOUR, None), [f"with -t 2h ({KNOWN})"], job_id=2, sensible=HUNDRED_MINUTES
    ),
    "a limit between what nearly all took and what is safe": Case(
        before_a_wide_job(2 * HOUR, 9 * HOUR), [f"with -t 1h55m ({KNOWN})"], job_id=2, sensible=HUNDRED_MINUTES
    ),
    "no limit that would end jobs like it": Case(
        before_a_wide_job(100 * MINUTE, None), [], job_id=2, sensible=HUNDRED_MINUTES
    ),
    "a limit that is half of what is asked and would end jobs like it": Case(
        before_a_wide_job(100 * MINUTE, 2 * HOUR), [], job_id=2, sensible=HUNDRED_MINUTES
    ),
    "no limit of a few minutes for a job that nobody knows": Case(before_a_wide_job(10 * MINUTE, None), [], job_id=2),
    "a job without a time limit is told to set one": Case(
        Scenario([node(gpus=2)], [wants(1, 2, limit=HOUR), wants(2, 1)], [running(9, "n1:0", ends_in=30 * MINUTE)]),
        ["with -t 25m" + UNKNOWN],
        job_id=2,
    ),
    "a gap that closes while one types is not proposed": Case(
        Scenario([node(gpus=2)], [wants(1, 2, limit=HOUR), wants(2, 1)], [running(9, "n1:0", ends_in=5 * MINUTE + 30)]),
        [],
        job_id=2,
    ),
    "behind a run without a limit, what is as short as that run is old": Case(
        Scenario([node(gpus=2)], [wants(1, 2), wants(2, 1, limit=3 * HOUR)], [running(9, "n1:0", since=2 * HOUR)]),
        ["with -t 1h55m" + UNKNOWN],
        job_id=2,
    ),
    "without backfill no time limit helps": Case(
        Scenario(
            [node(gpus=2)],
            [wants(1, 2, limit=HOUR), wants(2, 1, limit=5 * HOUR)],
            [running(9, "n1:0", ends_in=2 * HOUR)],
            settings=settings(priority={"backfill": False}),
        ),
        [],
        job_id=2,
    ),
    "fewer cores": Case(Scenario([node()], [wants(1, cpus=12.0)], [running(9, "n1", cpus=10.0)]), ["with -c 6"]),
    "less memory, but not less than half": Case(
        Scenario([node()], [wants(1, mem_mib=48 * 1024)], [running(9, "n1", mem_mib=32 * 1024)]), ["with -m 32G"]
    ),
    "much less memory is not proposed": Case(
        Scenario([node()], [wants(1, mem_mib=60 * 1024)], [running(9, "n1", mem_mib=50 * 1024)]), []
    ),
    "a smaller slice": Case(
        Scenario([node(gpus=1)], [wants(1, 1, vram_mib=16 * 1024)], [running(9, "n1:0", vram=12 * 1024)]),
        ["with --vram 11G"],
    ),
    "a slice beside one's own, in place of a whole card": Case(
        Scenario([node(gpus=1)], [wants(1, 1)], [running(9, "n1:0", vram=8 * 1024)]), ["with --vram 15G"]
    ),
    "no slice of a card of somebody else": Case(
        Scenario([node(gpus=1)], [wants(1, 1)], [running(9, "n1:0", vram=8 * 1024, uid=7)]), []
    ),
    "cards that are not so large": Case(
        Scenario([mixed()], [wants(1, 1, min_vram_mib=20 * 1024)], [running(9, "n1:0,1")]), ["without --min-vram 20G"]
    ),
    "half of a wish is not met by two changes at once": Case(
        Scenario([node(gpus=2)], [wants(1, 2, cpus=16.0)], [running(9, "n1:0", cpus=4.0)]), []
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_helpful_changes_are_proposed(name: str) -> None:
    case = CASES[name]
    snapshot = case.scenario.snapshot()
    found = alternatives(snapshot, case.scenario.settings, case.job_id, sensible=case.sensible)
    assert [one.text.removeprefix("would start now ") for one in found] == case.helps
    for one in found:
        assert one.is_now
        assert one.starts_at == snapshot.now
        assert starts_with(snapshot, case.scenario.settings, case.job_id, one)


def starts_with(snapshot: Snapshot, chosen: Settings, job_id: int, one: Alternative) -> bool:
    """Whether the job starts in a plan for the snapshot with the change made by hand."""
    classes: dict[ClassKey, PendingClass] = {}
    for waiting in snapshot.pending:
        rest = tuple(job for job in waiting.jobs if job.id != job_id)
        if rest:
            classes[waiting.key] = PendingClass(waiting.key, rest, len(rest))
        if len(rest) < len(waiting.jobs):
            (job,) = [job for job in waiting.jobs if job.id == job_id]
            own = {name: value for name, value in one.change.items() if name in ClassKey.__struct_fields__}
            terms = {name: value for name, value in one.change.items() if name in JobTerms.__struct_fields__}
            request = {
                FIELDS.get(name, name): value for name, value in one.change.items() if name not in {*own, *terms}
            }
            terms["request"] = replace(waiting.key.terms.request, **request)
            key = replace(waiting.key.with_terms(**terms), **own)
    jobs = (*classes[key].jobs, job) if key in classes else (job,)
    classes[key] = PendingClass(key, jobs, len(jobs))
    ordered = sorted(classes.values(), key=lambda waiting: (waiting.jobs[0].queued_at, waiting.jobs[0].id))
    plan = decide(replace(snapshot, pending=tuple(ordered)), chosen)
    return job_id in [start.job_id for start in plan.starts]


def test_the_smallest_change_comes_first() -> None:
    scenario = Scenario(
        [node(gpus=4)],
        [wants(1, 4, limit=HOUR), wants(2, 2, limit=5 * HOUR)],
        [running(9, "n1:0", ends_in=4 * HOUR), running(8, "n1:1", ends_in=30 * MINUTE)],
    )
    found = alternatives(scenario.snapshot(), scenario.settings, 2)
    assert (found[0].option, found[0].update) == ("-t 3h55m", "time=3h55m")


def test_a_change_that_only_speeds_up_is_proposed_as_a_last_resort() -> None:
    scenario = Scenario(
        [node(gpus=2)],
        [wants(1, 2)],
        [running(8, "n1:0", ends_in=HOUR), running(9, "n1:1", ends_in=10 * HOUR)],
    )
    (one,) = alternatives(scenario.snapshot(), scenario.settings, 1)
    assert (one.is_now, one.option, one.starts_at) == (False, "-g 1", scenario.snapshot().now + HOUR)
    assert one.text == "would start in 1 hour with -g 1" or one.text.startswith("would start in ")


def test_a_slightly_earlier_start_is_not_proposed() -> None:
    scenario = Scenario(
        [node(gpus=2)],
        [wants(1, 2)],
        [running(8, "n1:0", ends_in=HOUR), running(9, "n1:1", ends_in=1.5 * HOUR)],
    )
    assert alternatives(scenario.snapshot(), scenario.settings, 1) == ()


def test_inadmissible_changes_are_not_proposed() -> None:
    scenario = Scenario([node(gpus=2)], [wants(1, 2)], [running(9, "n1:0", ends_in=HOUR)])
    asked: list[ClassKey] = []

    def nobody(key: ClassKey) -> bool:
        asked.append(key)
        return False

    assert alternatives(scenario.snapshot(), scenario.settings, 1, nobody) == ()
    assert asked


@patches_the_planner
def test_the_number_of_plans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    plans, plan = 0, Planner.plan

    def counted(*args: Any) -> Any:
        nonlocal plans
        plans += 1
        return plan(*args)

    monkeypatch.setattr(Planner, "plan", counted)
    many = {name: QueueSettings(name) for name in (f"q{number}" for number in range(40))}
    wish = wants(1, 8, gpu_type="a100", cpus=16.0, mem_mib=64 * 1024, min_vram_mib=1024, limit=90_000)
    scenario = Scenario([mixed()], [wish], [running(9, "n1:0")], settings=replace(Settings(), queue=many))
    alternatives(scenario.snapshot(), scenario.settings, 1)
    assert 20 < plans <= BUDGET + 1


def test_an_unknown_job_gets_no_advice() -> None:
    scenario = Scenario([node(gpus=1)], [wants(1, 1)], [running(9, "n1:0")])
    assert alternatives(scenario.snapshot(), scenario.settings, 77) == ()


def test_leaving_a_reservation_that_is_not_open_yet_is_proposed() -> None:
    scenario = Scenario([node(gpus=1)], [wants(1, 1, limit=HOUR, reservation="course")])
    window = Window("course", NOW + 2 * HOUR, NOW + 4 * HOUR, (Placement("n1", (share(0),), 1.0, 0),), users=("ann",))
    snapshot = replace(scenario.snapshot(), windows=(window,))
    (one,) = alternatives(snapshot, scenario.settings, 1)
    assert one.text == "would start now without --reservation course"
    assert (one.option, one.update) == ("", "reservation=")
    assert starts_with(snapshot, scenario.settings, 1, one)


def test_another_queue_is_proposed_in_its_order() -> None:
    queues = {
        "default": QueueSettings("default", max_gpus=2.0),
        "open": QueueSettings("open"),
        "top": QueueSettings("top"),
        "leaf": QueueSettings("leaf", parent="top"),
    }
    scenario = Scenario(
        [node(gpus=4)],
        [wants(1, 2)],
        [running(9, "n1:0", ends_in=HOUR)],
        settings=replace(Settings(), queue=queues),
    )
    found = alternatives(scenario.snapshot(), scenario.settings, 1)
    assert [one.option for one in found] == ["-q leaf", "-q open", "-g 1"], "no job goes to a queue with others below"
    assert found[0].update == "queue=leaf"


@pytest.mark.parametrize(
    ("seconds", "typed"), [(300, "5m"), (5400, "1h30m"), (7200, "2h"), (86400, "1d"), (90000, "1d1h"), (61, "1m1s")]
)
def test_limits_are_printed_as_typed(seconds: int, typed: str) -> None:
    from gpusched.model.units import parse_duration_s

    assert format_limit(seconds) == typed
    assert parse_duration_s(typed) == seconds
