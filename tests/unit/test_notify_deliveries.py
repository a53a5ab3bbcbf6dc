"""What a worker still has to send: tries, waits, ends, and that every alert comes to exactly one."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gpusched.errors import UsageError
from gpusched.notify.deliveries import Deliveries, Limits
from gpusched.notify.sending import Result
from gpusched.notify.targets import Target, Targets, TargetsError

LIMITS = Limits(timeout_s=20, backoff_s=5, backoff_max_s=60, give_up_s=600)
TOLD, FAILED = Result(True), Result(False, "500")


class File:
    """A notify.toml that may be broken for a while."""

    def __init__(self, *names: str, exists: bool = True, on: frozenset[str] | None = None) -> None:
        targets = {name: Target(name, f"ntfy://{name}", on) for name in names}
        self.says = Targets("/x/notify.toml", exists, targets)
        self.is_broken = False

    def read(self) -> Targets:
        if self.is_broken:
            raise TargetsError([UsageError("line 3 is wrong")])
        return self.says


def order(key: str = "42.1 end", at: float = 0.0, **parts: Any) -> dict[str, Any]:
    fixed = {"event": "end", "counts_as": ["end"], "facts": {"name": "x"}, "targets": [], "settled": []}
    return {"key": key, "at": at, **fixed, **parts}


def due(deliveries: Deliveries, now: float) -> Any:
    found = deliveries.pick(now, ())
    assert found is not None
    return found


def test_an_alert_goes_to_every_target_that_wants_it_and_is_then_done() -> None:
    deliveries = Deliveries(LIMITS, File("a", "b").read)
    assert deliveries.take(order(), 0) == []
    first = due(deliveries, 0)
    letter, reports = deliveries.letter(first, 0)
    assert letter is not None
    assert (letter.url, letter.title, reports) == ("ntfy://a", "gpusched: job - (x): -", [])
    told = {"key": "42.1 end", "target": "a", "tries": 1, "outcome": "told"}
    assert deliveries.settle(first, TOLD, 0) == [told]
    assert deliveries.settle(due(deliveries, 0), TOLD, 0) == [
        {**told, "target": "b"},
        {"key": "42.1 end", "done": True},
    ]
    assert deliveries.pick(0, ()) is None


def test_a_target_that_was_told_before_a_restart_is_left_out() -> None:
    deliveries = Deliveries(LIMITS, File("a", "b").read)
    assert deliveries.take(order(settled=["a"]), 0) == []
    assert due(deliveries, 0).target == "b"
    assert Deliveries(LIMITS, File("a").read).take(order(settled=["a"]), 0) == [{"key": "42.1 end", "done": True}]


def test_nobody_who_wants_it_is_no_trouble_and_nobody_at_all_is_said() -> None:
    done = {"key": "42.1 end", "done": True}
    assert Deliveries(LIMITS, File("a", on=frozenset({"fail"})).read).take(order(), 0) == [done]
    said, last = Deliveries(LIMITS, File(exists=False).read).take(order(), 0)
    assert (said["outcome"], said["error"], last) == ("gave_up", "there is no /x/notify.toml", done)
    said, last = Deliveries(LIMITS, File().read).take(order(), 0)
    assert said["error"] == "/x/notify.toml names no target"
    said, last = Deliveries(LIMITS, File("a").read).take(order(targets=["b"]), 0)
    assert (said["target"], said["error"]) == ("b", "/x/notify.toml has no target of this name")
    said, last = Deliveries(LIMITS, File("a").read).take(order(targets=["b@c.org"]), 0)
    assert "has no mail server" in said["error"]


def test_waits_between_tries_double_up_to_the_longest_until_the_alert_is_too_old() -> None:
    deliveries = Deliveries(LIMITS, File("a").read)
    deliveries.take(order(), 0)
    now, waits = 0.0, []
    while True:
        delivery = due(deliveries, now)
        report, *rest = deliveries.settle(delivery, FAILED, now)
        if rest:
            break
        assert report["outcome"] == "failed"
        waits.append(report["next_s"])
        assert deliveries.pick(now, ()) is None
        now = delivery.due_at
    assert report["outcome"] == "gave_up"
    assert now < LIMITS.give_up_s
    for wait_s, plain_s in zip(waits, [5, 10, 20, 40, 60, 60], strict=False):
        assert 0.75 * plain_s <= wait_s <= 1.25 * plain_s


def test_an_old_alert_gets_one_try_and_a_hopeless_one_no_second() -> None:
    deliveries = Deliveries(LIMITS, File("a").read)
    deliveries.take(order(), 10_000)
    assert deliveries.settle(due(deliveries, 10_000), FAILED, 10_000)[0]["outcome"] == "gave_up"
    deliveries = Deliveries(LIMITS, File("a").read)
    deliveries.take(order(), 0)
    final = Result(False, "apprise is not installed", is_final=True)
    assert deliveries.settle(due(deliveries, 0), final, 0)[0]["outcome"] == "gave_up"


def test_a_busy_target_waits_and_the_others_do_not() -> None:
    deliveries = Deliveries(LIMITS, File("a", "b").read)
    deliveries.take(order("1"), 0)
    deliveries.take(order("2"), 1)
    found = deliveries.pick(1, {"a"})
    assert found is not None
    assert (found.target, found.order["key"]) == ("b", "1")
    assert deliveries.next_due({"a"}) == 1
    assert deliveries.next_due({"a", "b"}) is None


def test_a_target_that_fails_rests_as_a_whole_however_much_waits_for_it() -> None:
    deliveries = Deliveries(LIMITS, File("dead", "well").read)
    for number in range(1000):
        deliveries.take(order(str(number)), 0)
    now, tries, told = 0.0, 0, 0
    while (due_at := deliveries.next_due(())) is not None and due_at < 300:
        now = max(now, due_at)
        delivery = due(deliveries, now)
        tries += delivery.target == "dead"
        told += delivery.target == "well"
        deliveries.settle(delivery, FAILED if delivery.target == "dead" else TOLD, now)
    # 5 + 10 + 20 + 40 + 60 + 60 + ... s, give or take the jitter, and not once for each alert.
    assert told == 1000
    assert 6 <= tries <= 12
    assert deliveries.settle(due(deliveries, now + 90), TOLD, now + 90)[0]["outcome"] == "told"
    # Once it is reached again nothing rests any more.
    assert deliveries.pick(now + 90, ()) is not None


def test_what_waits_behind_a_failing_target_is_given_up_when_it_is_too_old() -> None:
    deliveries = Deliveries(Limits(timeout_s=20, backoff_s=100, backoff_max_s=100, give_up_s=600), File("a").read)
    for key, at in (("1", 0), ("2", 1), ("young", 500)):
        deliveries.take(order(key, at=at), 550)
    reports = deliveries.settle(due(deliveries, 550), FAILED, 550)
    gave_up = {"target": "a", "outcome": "gave_up", "error": "500"}
    assert reports == [
        {"key": "1", "tries": 1, **gave_up},
        {"key": "1", "done": True},
        {"key": "2", "tries": 0, **gave_up},
        {"key": "2", "done": True},
    ]
    assert due(deliveries, 700).order["key"] == "young"


def test_a_file_that_is_broken_is_said_and_read_again() -> None:
    file = File("a")
    file.is_broken = True
    deliveries = Deliveries(LIMITS, file.read)
    (report,) = deliveries.take(order(), 0)
    assert (report["target"], report["outcome"], report["error"]) == ("", "failed", "line 3 is wrong")
    now = report["next_s"]
    (again,) = deliveries.letter(due(deliveries, now), now)[1]
    assert again["tries"] == 2
    file.is_broken = False
    now += again["next_s"]
    assert deliveries.letter(due(deliveries, now), now) == (None, [])
    assert due(deliveries, now).target == "a"


def test_a_target_that_was_taken_out_meanwhile_is_given_up() -> None:
    file = File("a")
    deliveries = Deliveries(LIMITS, file.read)
    deliveries.take(order(), 0)
    file.says = File().says
    letter, reports = deliveries.letter(due(deliveries, 0), 0)
    assert letter is None
    assert [report.get("outcome") for report in reports] == ["gave_up", None]


@given(
    st.lists(st.sampled_from(["1", "2", "3"]), min_size=1, max_size=6),
    st.sets(st.sampled_from("abc")),
    st.lists(st.sampled_from(["told", "failed", "final", "broken", "mended"]), max_size=60),
)
def test_every_alert_is_done_once_and_every_target_is_told_at_most_once(
    keys: list[str], names: set[str], happenings: list[str]
) -> None:
    file = File(*sorted(names))
    deliveries = Deliveries(LIMITS, file.read)
    now = 0.0
    reports = [report for key in dict.fromkeys(keys) for report in deliveries.take(order(key), now)]
    happenings = [*happenings, "mended"]
    while (due_at := deliveries.next_due(())) is not None:
        now = max(now, due_at)
        what = happenings.pop(0) if happenings else "told"
        if what in ("broken", "mended"):
            file.is_broken = what == "broken"
            continue
        delivery = due(deliveries, now)
        letter, found = deliveries.letter(delivery, now)
        reports += found
        if letter is not None:
            reports += deliveries.settle(delivery, Result(what == "told", "x", what == "final"), now)
    assert sorted(report["key"] for report in reports if report.get("done")) == sorted(set(keys))
    settled = [(report["key"], report["target"]) for report in reports if report.get("outcome") in ("told", "gave_up")]
    assert len(settled) == len(set(settled))
    last = {report["key"]: report for report in reports}
    assert all(report.get("done") for report in last.values())
