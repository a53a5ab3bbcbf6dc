"""One batch of alerts: whom they go to, in which order, and what rests after a failure."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.addons.notify.attempt import SendResult
from gpusched.addons.notify.sender import AlertBatch, AlertOrder, TargetBackoff
from gpusched.addons.notify.targets import Target, Targets, TargetsError
from gpusched.errors import UsageError
from gpusched.model.alerts import Alert
from gpusched.model.settings import AlertSettings

LIMITS = AlertSettings(timeout_s=20, backoff_s=5, backoff_max_s=60, give_up_s=600)
TOLD, FAILED = SendResult(True), SendResult(False, "500")
DONE = {"key": "42.1 end", "done": True}


class File:
    """A notify.toml that may be broken for a while."""

    def __init__(self, *names: str, exists: bool = True, on: frozenset[str] | None = None) -> None:
        targets = {name: Target(name, f"ntfy://{name}", on) for name in names}
        self.says = Targets("/x/notify.toml", exists, targets)
        self.is_broken = False
        self.reads = 0

    def read(self) -> Targets:
        self.reads += 1
        if self.is_broken:
            raise TargetsError([UsageError("line 3 is wrong")])
        return self.says


def order(key: str = "42.1 end", at: float = 0.0, tries: dict[str, int] | None = None, **parts: Any) -> AlertOrder:
    fixed = {"event": "end", "counts_as": ("end",), "uid": 0, "facts": (("name", "x"),)}
    return AlertOrder(Alert(key=key, at=at, **{**fixed, **parts}), tries or {})


def batch(
    file: File, *orders: AlertOrder, now: float = 0.0, limits: AlertSettings = LIMITS, **rests: TargetBackoff
) -> AlertBatch:
    return AlertBatch(orders or [order()], rests, limits, file.read, now)


def due(found: AlertBatch, now: float = 0.0) -> Any:
    delivery = found.pick(now, ())
    assert delivery is not None
    return delivery


def test_an_alert_goes_to_every_subscribed_target_and_is_then_done() -> None:
    found = batch(File("a", "b"))
    assert found.reports == []
    first = due(found)
    letter = found.letter(first)
    assert (letter.url, letter.title) == ("ntfy://a", "gpusched: job - (x): -")
    told = {"key": "42.1 end", "target": "a", "tries": 1, "outcome": "told"}
    assert found.settle(first, TOLD, 0) == [told]
    assert found.settle(due(found), TOLD, 0) == [{**told, "target": "b"}, DONE]
    assert found.pick(0, ()) is None
    assert found.next_s(0) is None


def test_an_already_notified_target_is_skipped() -> None:
    found = batch(File("a", "b"), order(settled=("a",)))
    assert due(found).target == "b"
    assert batch(File("a"), order(settled=("a",))).reports == [DONE]


def test_no_subscriber_is_fine_and_no_target_is_reported() -> None:
    assert batch(File("a", on=frozenset({"fail"}))).reports == [DONE]
    said, last = batch(File(exists=False)).reports
    assert (said["outcome"], said["error"], last) == ("gave_up", "there is no /x/notify.toml", DONE)
    said, last = batch(File()).reports
    assert said["error"] == "/x/notify.toml names no target"
    said, last = batch(File("a"), order(targets=("b",))).reports
    assert (said["target"], said["error"]) == ("b", "/x/notify.toml has no target of this name")
    said, last = batch(File("a"), order(targets=("b@c.org",))).reports
    assert "has no mail server" in said["error"]


def test_retries_back_off_exponentially_until_the_alert_expires() -> None:
    now, waits, rests, tries = 0.0, [], {}, 0
    while True:
        found = batch(File("a"), order(tries={"a": tries}), now=now, **rests)
        report, *rest = found.settle(due(found, now), FAILED, now)
        if rest:
            break
        assert report["outcome"] == "failed"
        assert found.pick(now, ()) is None
        assert found.next_s(now) == pytest.approx(report["next_s"])
        tries += 1
        assert (report["tries"], report["failures"]) == (tries, tries)
        waits.append(report["next_s"])
        now += report["next_s"]
        rests = {"a": TargetBackoff(report["failures"], now)}
    assert (report["outcome"], rest) == ("gave_up", [DONE])
    assert now < LIMITS.give_up_s
    for wait_s, plain_s in zip(waits, [5, 10, 20, 40, 60, 60], strict=False):
        assert 0.75 * plain_s <= wait_s <= 1.25 * plain_s


def test_an_old_alert_gets_one_attempt_and_a_hopeless_one_no_second() -> None:
    found = batch(File("a"), now=10_000)
    assert found.settle(due(found, 10_000), FAILED, 10_000)[0]["outcome"] == "gave_up"
    found = batch(File("a"))
    final = SendResult(False, "apprise is not installed", is_final=True)
    (report, last) = found.settle(due(found), final, 0)
    assert (report["outcome"], "failures" in report, last) == ("gave_up", False, DONE)


def test_a_busy_target_waits_and_the_others_do_not() -> None:
    found = batch(File("a", "b"), order("2", at=1), order("1", at=0))
    delivery = found.pick(1, {"a"})
    assert delivery is not None
    assert (delivery.target, delivery.order.alert.key) == ("b", "1")
    assert found.pick(1, {"a", "b"}) is None
    assert found.next_s(1) == 0


def test_a_failing_target_backs_off_as_a_whole() -> None:
    orders = [order(str(number)) for number in range(1000)]
    found = batch(File("dead", "well"), *orders)
    tries, told = 0, 0
    while (delivery := found.pick(0, ())) is not None:
        tries += delivery.target == "dead"
        told += delivery.target == "well"
        found.settle(delivery, FAILED if delivery.target == "dead" else TOLD, 0)
    assert (told, tries) == (1000, 1)
    later = batch(File("dead"), *orders, dead=TargetBackoff(3, 20))
    assert later.pick(19, ()) is None
    assert later.settle(due(later, 20), TOLD, 20)[0]["outcome"] == "told"
    # Once it is reached again nothing rests any more.
    assert later.pick(20, ()) is not None


def test_an_alert_refused_by_its_target_blocks_no_other() -> None:
    found = batch(File("a"), order("refused", at=0, tries={"a": 2}), order("new", at=9))
    assert due(found).order.alert.key == "new"


def test_alerts_behind_a_failing_target_expire() -> None:
    limits = AlertSettings(timeout_s=20, backoff_s=100, backoff_max_s=100, give_up_s=600)
    found = batch(File("a"), *(order(key, at=at) for key, at in (("1", 0), ("2", 1), ("young", 500))), limits=limits)
    first, *others = found.settle(due(found, 550), FAILED, 550)
    gave_up = {"target": "a", "outcome": "gave_up", "error": "500"}
    assert {name: first[name] for name in ("key", "tries", *gave_up)} == {"key": "1", "tries": 1, **gave_up}
    assert others == [{"key": "1", "done": True}, {"key": "2", "tries": 0, **gave_up}, {"key": "2", "done": True}]
    assert due(found, 700).order.alert.key == "young"


def test_a_broken_file_is_read_once_reported_once_and_backs_off() -> None:
    file = File("a")
    file.is_broken = True
    found = batch(file, order("1"), order("2"))
    (report,) = found.reports
    assert (report["key"], report["target"], report["outcome"]) == ("1", "", "failed")
    assert report["error"] == "line 3 is wrong"
    assert (file.reads, found.pick(0, ())) == (1, None)
    rest = {"": TargetBackoff(1, report["next_s"])}
    assert batch(file, order("1", tries={"": 1}), now=1, **rest).reports == []
    (again,) = batch(file, order("1", tries={"": 1}), now=10, **rest).reports
    assert (again["tries"], again["failures"]) == (2, 2)
    file.is_broken = False
    assert due(batch(file, order("1", tries={"": 2}), now=11, **rest), 11).target == "a"


def test_a_broken_file_delays_no_alert_that_does_not_need_it() -> None:
    file = File("a")
    file.is_broken = True
    found = batch(file, order("1"), order("2", targets=("@write",)))
    assert found.letter(due(found)).url == "terminals:"


@given(
    st.lists(st.sampled_from(["1", "2", "3"]), min_size=1, max_size=6, unique=True),
    st.sets(st.sampled_from("abc")),
    st.lists(st.sampled_from(["told", "failed", "final", "broken", "mended", "cut"]), max_size=60),
)
def test_every_alert_is_done_once_and_every_target_notified_at_most_once(
    keys: list[str], names: set[str], happenings: list[str]
) -> None:
    """Over as many batches as it takes, of which any may be cut off after any try."""
    file = File(*sorted(names))
    reports: list[dict[str, Any]] = []
    settled: dict[str, list[str]] = {key: [] for key in keys}
    tries: dict[str, dict[str, int]] = {key: {} for key in keys}
    rests: dict[str, TargetBackoff] = {}
    left, now = set(keys), 0.0

    def note(found: list[dict[str, Any]]) -> None:
        for report in found:
            reports.append(report)
            if report.get("done"):
                left.remove(report["key"])
            elif report["outcome"] == "failed":
                tries[report["key"]][report["target"]] = report["tries"]
            else:
                settled[report["key"]].append(report["target"])
            if "failures" in report:
                rests[report["target"]] = TargetBackoff(report["failures"], now + report["next_s"])

    while left:
        orders = [order(key, settled=settled[key], tries=tries[key]) for key in sorted(left)]
        found = AlertBatch(orders, rests, LIMITS, file.read, now)
        note(found.reports)
        while (delivery := found.pick(now, ())) is not None:
            what = happenings.pop(0) if happenings else "told"
            if what in ("broken", "mended"):
                file.is_broken = what == "broken"
            if what == "cut":
                break
            note(found.settle(delivery, SendResult(what == "told", "x", what == "final"), now))
        else:
            now += found.next_s(now) or 0.0
        if not happenings:
            file.is_broken = False
    assert sorted(report["key"] for report in reports if report.get("done")) == sorted(keys)
    told = [(report["key"], report["target"]) for report in reports if report.get("outcome") in ("told", "gave_up")]
    assert len(told) == len(set(told))
