"""What the API says of priorities, usage, accounts and queues, on a scheduler turned by hand."""

from __future__ import annotations

from typing import Any

import pytest
from answering import get
from lab import ANN, BOB, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.api import visibility
from gpusched.api.handlers import queues
from gpusched.errors import NotFound, UsageError
from gpusched.model.commands import Hold
from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.queue_settings import AccountSettings, QosSettings, QueueSettings
from gpusched.model.settings import AccessSettings
from gpusched.testing import request

QUEUES = {
    "lab": QueueSettings("lab", max_gpus=8),
    "vision": QueueSettings("vision", parent="lab", guaranteed_gpus=3),
    "nlp": QueueSettings("nlp", parent="lab", guaranteed_gpus=1, weight=2.0, preemptible=False, order="sjf"),
    "rest": QueueSettings("rest"),
}
ACCOUNTS = {
    "group": AccountSettings("group", shares=3),
    "inner": AccountSettings("inner", parent="group", users={"ann": 2.0}),
    "other": AccountSettings("other", users={"*": 1.0}),
}
QOS = {"high": QosSettings("high", tier=5, factor=1.0), "free": QosSettings("free", usage_factor=0.0)}


@pytest.fixture
def lab() -> Lab:
    return Lab(4, outcome=SimulatedOutcome(runs_s=3600), queue=QUEUES, account=ACCOUNTS, qos=QOS)


@pytest.fixture(autouse=True)
def _ann_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visibility, "caller_of", lambda request: ANN)


def gpus(lab: Lab, count: int, queue: str = "rest", **parts: Any) -> int:
    return lab.submit(request=request(count), queue=queue, **{"account": "other", **parts})


def by_name(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in answer["queues"]}


# --- queues -------------------------------------------------------------------------------------


def test_queues_are_listed_before_their_children(lab: Lab) -> None:
    rows = get(lab, queues.queues)["queues"]
    assert [(row["name"], row["depth"], row["parent"]) for row in rows] == [
        ("lab", 0, None),
        ("nlp", 1, "lab"),
        ("vision", 1, "lab"),
        ("rest", 0, None),
    ]
    nlp = rows[1]
    assert (nlp["weight"], nlp["preemptible"], nlp["order"], nlp["max_gpus"]) == (2.0, False, "sjf", None)
    assert (rows[0]["guaranteed_gpus"], rows[0]["max_gpus"], rows[0]["weight"]) == (4.0, 8, 1.0)


def test_queues_tell_what_clients_show_as_partitions() -> None:
    found = {
        "top": QueueSettings("top", max_time_s=600),
        "leaf": QueueSettings("leaf", parent="top", max_time_s=900, default_time_s=60, accounts=("inner", "other")),
        "alone": QueueSettings("alone", preemptible=False),
    }
    rows = by_name(get(Lab(1, queue=found, account=ACCOUNTS), queues.queues))
    assert {name: (row["is_leaf"], row["position"]) for name, row in rows.items()} == {
        "top": (False, 0),
        "leaf": (True, 1),
        "alone": (True, 2),
    }
    leaf, alone = rows["leaf"], rows["alone"]
    assert (leaf["max_time_s"], leaf["default_time_s"]) == (600, 60), "the least of the queues above it"
    assert (leaf["accounts"], leaf["preempt_mode"], alone["preempt_mode"]) == (["inner", "other"], "requeue", "off")
    private = AccessSettings(private_data=("accounts",))
    rows = by_name(get(Lab(1, queue=found, account=ACCOUNTS, access=private), queues.queues))
    assert rows["leaf"]["accounts"] == ["inner", "other"], "of both she is a member"
    only_inner = {name: AccountSettings(name, users={user: 1.0}) for name, user in (("inner", "ann"), ("other", "bob"))}
    rows = by_name(get(Lab(1, queue=found, account=only_inner, access=private), queues.queues))
    assert rows["leaf"]["accounts"] == ["inner", "-"]


def test_lent_amounts_equal_borrowed_ones_and_have_names(lab: Lab) -> None:
    gpus(lab, 3, "nlp")
    answer = get(lab, queues.queues)
    rows = by_name(answer)
    assert answer["loans"] == [{"lender": "vision", "borrower": "nlp", "gpus": 2.0, "cpus": 0.0, "mem_mib": 0.0}]
    assert (rows["nlp"]["used_gpus"], rows["nlp"]["borrowed_gpus"], rows["nlp"]["lent_gpus"]) == (3.0, 2.0, 0.0)
    assert (rows["vision"]["used_gpus"], rows["vision"]["borrowed_gpus"], rows["vision"]["lent_gpus"]) == (
        0.0,
        0.0,
        2.0,
    )
    assert rows["lab"]["used_gpus"] == 3.0


def test_jobs_are_counted_in_their_queue_and_its_parents(lab: Lab) -> None:
    gpus(lab, 1, "vision")
    gpus(lab, 1, "nlp")
    gpus(lab, 4, "nlp")
    gpus(lab, 4, "rest")
    rows = by_name(get(lab, queues.queues))
    counts = {name: (row["running"], row["pending"]) for name, row in rows.items()}
    assert counts == {"lab": (2, 1), "vision": (1, 0), "nlp": (1, 1), "rest": (0, 1)}


def test_one_queue_is_shown_with_its_children_and_loans(lab: Lab) -> None:
    gpus(lab, 2, "nlp")
    assert [row["name"] for row in get(lab, queues.queues, "name=lab")["queues"]] == ["lab", "nlp", "vision"]
    assert get(lab, queues.queues, "name=lab")["loans"] == []
    one = get(lab, queues.queues, "name=vision")
    assert [row["name"] for row in one["queues"]] == ["vision"]
    assert [loan["borrower"] for loan in one["loans"]] == ["nlp"]
    with pytest.raises(NotFound, match="there is no queue 'visoin'"):
        get(lab, queues.queues, "name=visoin")


def test_without_settings_the_default_and_used_queues_are_listed() -> None:
    lab = Lab(2, outcome=SimulatedOutcome(runs_s=3600))
    assert [row["name"] for row in get(lab, queues.queues)["queues"]] == ["default"]
    gpus(lab, 1, "zoo", account="")
    rows = by_name(get(lab, queues.queues))
    assert list(rows) == ["default", "zoo"]
    assert rows["zoo"]["used_gpus"] == 1.0


# --- priorities ---------------------------------------------------------------------------------


def test_pending_jobs_are_listed_by_tier_and_priority_with_all_parts(lab: Lab) -> None:
    running = gpus(lab, 4)
    low = gpus(lab, 1, nice=100)
    plain = gpus(lab, 1)
    high = gpus(lab, 1, qos="high", nice=10000)
    lab.ask(Hold(ANN, (low,)))
    answer = get(lab, queues.priorities)
    rows = answer["priorities"]
    assert [int(row["id"]) for row in rows] == [high, plain, low]
    assert str(running) not in {row["id"] for row in rows}
    assert [row["tier"] for row in rows] == [5, 0, 0]
    for row in rows:
        assert row["priority"] == pytest.approx(sum(row["parts"].values()))
        assert set(answer["weights"]) == set(row["parts"])
    assert rows[0]["parts"]["qos"] == answer["weights"]["qos"]
    assert rows[1]["parts"]["nice"] - rows[2]["parts"]["nice"] == pytest.approx(100)
    assert answer["order"] == "response_ratio"


@pytest.mark.parametrize("order", ["response_ratio", "multifactor"])
def test_shared_rows_of_priorities_are_those_of_each_job(order: str) -> None:
    lab = Lab(cpus=1, priority=PrioritySettings(order=order))
    for nice in (0, 5, 0, 5, 0):
        lab.submit(nice=nice)
    lab.tick()
    whole, shared = get(lab, queues.priorities), get(lab, queues.priorities, "shared=1")
    rows = [{"id": job_id, "name": "job", **shared["priorities"][number]} for job_id, number in shared["jobs"]]
    assert rows == [{**row, "name": "job"} for row in whole["priorities"]]
    assert len(shared["priorities"]) < len(rows) == 4


def test_priorities_of_named_jobs_are_listed_alone(lab: Lab) -> None:
    gpus(lab, 4)
    first, second = gpus(lab, 1), gpus(lab, 1)
    assert [row["id"] for row in get(lab, queues.priorities, f"ids={second}")["priorities"]] == [str(second)]
    assert [row["id"] for row in get(lab, queues.priorities, "limit=1")["priorities"]] == [str(second)]
    assert first < second


# --- accounts -----------------------------------------------------------------------------------


def test_the_account_tree_shows_usage(lab: Lab) -> None:
    gpus(lab, 4, account="inner")
    lab.tick(1800)
    rows = get(lab, queues.accounts)["accounts"]
    assert [(row["account"], row["user"], row["depth"]) for row in rows] == [
        ("", None, 0),
        ("group", None, 1),
        ("inner", None, 2),
        ("inner", "ann", 3),
        ("other", None, 1),
    ]
    root, group, inner, ann, other = rows
    assert ann["gpu_hours"] == pytest.approx(2.0, rel=0.01)
    assert ann["gpu_hours"] == inner["gpu_hours"] == group["gpu_hours"] == root["gpu_hours"]
    assert (group["shares"], group["norm_shares"], other["norm_shares"]) == (3, 0.75, 0.25)
    assert (group["effective_usage"], other["effective_usage"]) == (1.0, 0.0)
    assert group["level_fs"] == 0.75
    assert other["level_fs"] is None, "infinite: it has used nothing"
    assert (ann["fairshare"], other["fairshare"]) == (1.0, None)


def test_one_account_is_shown_with_its_descendants(lab: Lab) -> None:
    rows = get(lab, queues.accounts, "name=group")["accounts"]
    assert [(row["account"], row["user"]) for row in rows] == [("group", None), ("inner", None), ("inner", "ann")]
    assert [row["account"] for row in get(lab, queues.accounts, "name=other")["accounts"]] == ["other"]
    with pytest.raises(NotFound) as raised:
        get(lab, queues.accounts, "name=gruop")
    assert raised.value.hint == "accounts: group, inner, other"


def test_accounts_list_their_members_and_mark_the_callers(lab: Lab) -> None:
    answer = get(lab, queues.accounts)
    members = {row["account"]: (row["users"], row["groups"]) for row in answer["accounts"] if row["user"] is None}
    assert members == {"": (None, None), "group": ([], []), "inner": (["ann"], []), "other": (["*"], [])}
    assert [row["users"] for row in answer["accounts"] if row["user"] is not None] == [None]
    assert (answer["user"], answer["own_accounts"], answer["default_account"]) == ("ann", ["inner", "other"], "inner")


def test_accounts_without_members_are_shown_as_open() -> None:
    lab = Lab(1, account={"a": AccountSettings("a"), "b": AccountSettings("b")})
    answer = get(lab, queues.accounts)
    assert {row["account"]: row["users"] for row in answer["accounts"]} == {"": None, "a": ["*"], "b": ["*"]}
    assert (answer["own_accounts"], answer["default_account"]) == (["a", "b"], None)


def test_without_accounts_the_callers_name_is_the_account() -> None:
    answer = get(Lab(1), queues.accounts)
    assert (answer["own_accounts"], answer["default_account"]) == (["ann"], "ann")


def test_private_accounts_are_shown_to_members_without_other_members() -> None:
    accounts = {**ACCOUNTS, "bobs": AccountSettings("bobs", users={"bob": 1.0})}
    lab = Lab(1, account=accounts, access=AccessSettings(private_data=("accounts",)))
    answer = get(lab, queues.accounts)
    assert [row["account"] for row in answer["accounts"] if row["user"] is None] == ["", "group", "inner", "other"]
    assert {(row["users"], row["groups"]) for row in answer["accounts"]} == {(None, None)}
    assert answer["own_accounts"] == ["inner", "other"]


# --- usage --------------------------------------------------------------------------------------


def test_usage_sums_ended_and_open_runs() -> None:
    accounts = {"a": AccountSettings("a"), "bob": AccountSettings("bob")}
    lab = Lab(4, outcome=SimulatedOutcome(runs_s=3600), priority=PrioritySettings(backfill=False), account=accounts)
    lab.submit(request=request(2, cpus=1.0, mem_mib=2048), account="a")
    lab.tick(3600)
    lab.tick()
    lab.ask(lab.submission(BOB, request=request(1, cpus=0.5)))
    lab.tick(1800)
    answer = get(lab, queues.usage, "since=0")
    ann, bob = answer["usage"]
    assert (ann["user"], ann["jobs"], ann["runs"]) == ("ann", 1, 1)
    assert (ann["gpu_hours"], ann["core_hours"], ann["mem_gib_hours"]) == pytest.approx((2, 1, 2), rel=0.01)
    assert bob["user"] == "bob"
    assert (bob["gpu_hours"], bob["core_hours"]) == pytest.approx((0.5, 0.25), rel=0.01)
    assert ann["mean_wait_s"] == 0.0
    assert (answer["by"], answer["since"], answer["until"]) == ("user", 0, lab.clock.now())
    by_account = get(lab, queues.usage, "since=0&by=account")["usage"]
    assert [(row["account"], row["jobs"]) for row in by_account] == [("a", 1), ("bob", 1)]
    assert get(lab, queues.usage, "since=0&users=bob")["usage"] == [bob]
    (late,) = get(lab, queues.usage, f"since={lab.clock.now() - 360}")["usage"]
    assert (late["user"], late["gpu_hours"], late["mean_wait_s"]) == ("bob", pytest.approx(0.1), None)


def test_usage_by_an_unknown_word_is_refused(lab: Lab) -> None:
    with pytest.raises(UsageError, match="by is 'node'; it must be one of user, account, queue"):
        get(lab, queues.usage, "by=node")
