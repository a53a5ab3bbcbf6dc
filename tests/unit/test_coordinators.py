"""Coordinators of accounts: what they may do there, and that they may do nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from lab import ANN, BOB, Lab

from gpusched import access, paths
from gpusched.access import Act
from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.config.load import settings_in
from gpusched.daemon import reload
from gpusched.errors import Forbidden, GpuschedError, NotFound, Refused, UsageError
from gpusched.model.commands import (
    Caller,
    Cancel,
    ChangeMembers,
    GiveCredit,
    Hold,
    Release,
    Reload,
    Selection,
    SetUserLimit,
    UndoTableSettings,
    Update,
)
from gpusched.model.queue_settings import AccountSettings
from gpusched.model.settings import AccessSettings
from gpusched.model.states import JobState
from gpusched.model.table_settings import document_of_table
from gpusched.model.value import replace
from gpusched.ports import JobFilter
from gpusched.ports.tables import TABLE_SETTINGS
from gpusched.testing import request

CARLA = Caller(1007, "carla")
DORA = Caller(1008, "dora")
ROOT = Caller(0, "root")
ACCOUNTS = {
    "science": AccountSettings("science", users={"dora": 1.0}, gpu_hours=100.0),
    "vision": AccountSettings("vision", parent="science", users={"ann": 1.0, "bob": 2.0}, coordinators=("carla",)),
    "nlp": AccountSettings("nlp", parent="vision", users={"ann": 1.0}),
    "chem": AccountSettings("chem", users={"bob": 1.0}),
}


def lab(**sections: Any) -> Lab:
    return Lab(gpus=4, outcome=SimulatedOutcome(runs_s=1e6), account=ACCOUNTS, **sections)


def submit(where: Lab, caller: Caller, account: str, **parts: Any) -> Any:
    return where.ask(where.submission(caller, request=request(gpus=1), account=account, **parts))[0]


def ok(answer: Any) -> None:
    assert not isinstance(answer, GpuschedError), answer


ALL = list(Act)
OF_COORDINATORS = {Act.CANCEL, Act.HOLD, Act.RELEASE, Act.PRIORITISE}


@pytest.mark.parametrize("act", ALL, ids=str)
@pytest.mark.parametrize(
    ("account", "is_theirs"), [("vision", True), ("nlp", True), ("science", False), ("chem", False)]
)
def test_rights_over_jobs_are_these_and_only_in_the_account_and_below(act: Act, account: str, is_theirs: bool) -> None:
    made = lab()
    who = {"vision": ANN, "nlp": ANN, "science": DORA, "chem": BOB}[account]
    job = made.job(submit(made, who, account)["ids"][0])
    assert access.may(CARLA, act, job, made.settings) is (is_theirs and act in OF_COORDINATORS)
    # One who coordinates nothing has no right, and being named elsewhere gives none.
    assert not access.may(Caller(1009, "eve"), act, job, made.settings)


@pytest.mark.parametrize("private", [(), ("jobs",)])
def test_jobs_are_held_released_put_back_and_cancelled(private: tuple[str, ...]) -> None:
    made = lab(access=AccessSettings(private_data=private))
    other = made.ask(made.submission(BOB, request=request(gpus=4), account="chem"))[0]["ids"][0]
    mine = submit(made, ANN, "nlp")["ids"][0]
    for command in (Hold(CARLA, (mine,)), Release(CARLA, (mine,))):
        ok(made.ask(command)[0])
    ok(made.ask(Update(CARLA, (mine,), {"nice": 50}))[0])
    assert made.job(mine).spec.nice == 50
    foreign = NotFound if private else Forbidden
    for command in (
        Hold(CARLA, (other,)),
        Update(CARLA, (other,), {"nice": 50}),
        Cancel(CARLA, Selection(ids=(other,))),
    ):
        assert isinstance(made.ask(command)[0], foreign)
    for changes in ({"time_limit_s": 60}, {"nice": 1, "time_limit_s": 60}, {"nice": -5}, {"account": "chem"}):
        assert isinstance(made.ask(Update(CARLA, (mine,), changes))[0], Forbidden), changes
    ok(made.ask(Cancel(CARLA, Selection(ids=(mine,))))[0])
    (ended,) = made.store.jobs(JobFilter(ids=frozenset({mine})))
    assert ended.state is JobState.CANCELLED
    assert made.job(other).state in (JobState.PENDING, JobState.RUNNING)


def test_members_come_and_go_survive_a_restart_and_are_recorded() -> None:
    made = lab()
    recorded: list[tuple[str, str, Any]] = []
    made.scheduler.signals.settings_set.connect(
        lambda settings, caller, what, table: recorded.append((caller.user, what, dict(table.get("member", {}))))
    )
    assert isinstance(submit(made, DORA, "vision"), GpuschedError)
    assert made.ask(ChangeMembers(CARLA, "vision", ("dora",), ("bob",), "gctl account members vision add=dora")) == [
        {"members": ["ann", "dora"]}
    ]
    ok(submit(made, DORA, "vision"))
    assert isinstance(submit(made, BOB, "vision"), GpuschedError)
    ((user, what, table),) = recorded
    assert (user, what, sorted(table)) == (
        "carla",
        "gctl account members vision add=dora",
        ["vision bob", "vision dora"],
    )
    made.restart()
    ok(submit(made, DORA, "vision"))
    assert isinstance(submit(made, BOB, "vision"), GpuschedError)
    # An admin takes it back.
    pairs = tuple((("member", name), None, content) for name, content in table.items())
    ok(made.ask(UndoTableSettings(ROOT, 1, pairs))[0])
    ok(submit(made, BOB, "vision"))
    assert isinstance(submit(made, DORA, "vision"), GpuschedError)


def test_removal_is_brought_back_by_the_undo_of_what_came_after_it() -> None:
    made = lab()
    documents = []
    for command in (ChangeMembers(CARLA, "vision", remove=("bob",)), ChangeMembers(CARLA, "vision", add=("bob",))):
        ok(made.ask(command)[0])
        documents.append(document_of_table(made.scheduler.state.rows[TABLE_SETTINGS])["member"]["vision bob"])
    removed, added = documents
    ok(made.ask(UndoTableSettings(ROOT, 2, ((("member", "vision bob"), removed, added),)))[0])
    assert sorted(made.scheduler.settings.account["vision"].users) == ["ann"]
    ok(made.ask(UndoTableSettings(ROOT, 1, ((("member", "vision bob"), None, removed),)))[0])
    assert sorted(made.scheduler.settings.account["vision"].users) == ["ann", "bob"]


def test_commands_of_one_tick_see_each_other() -> None:
    made = lab()
    answers = made.ask(
        ChangeMembers(CARLA, "vision", add=("dora",)),
        ChangeMembers(CARLA, "vision", remove=("dora",)),
        ChangeMembers(CARLA, "nlp", add=("dora", "eve")),
        ChangeMembers(CARLA, "nlp", remove=("eve",)),
    )
    for answer in answers:
        ok(answer)
    assert sorted(made.scheduler.settings.account["vision"].users) == ["ann", "bob"]
    assert sorted(made.scheduler.settings.account["nlp"].users) == ["ann", "dora"]


def test_what_the_admin_writes_about_a_member_goes_before_the_coordinators_word() -> None:
    made = lab()
    ok(made.ask(ChangeMembers(CARLA, "vision", ("dora",), ("bob",)))[0])

    def write(**users: float) -> list[str]:
        vision = replace(made.settings.account["vision"], users=users)
        made.settings = replace(made.settings, account={**made.settings.account, "vision": vision})
        ok(made.ask(Reload(ROOT))[0])
        return sorted(made.scheduler.settings.account["vision"].users)

    # Something else in the file leaves the coordinator's word alone; what concerns the member settles it.
    assert write(ann=3.0, bob=2.0) == ["ann", "dora"]
    assert write(ann=3.0, bob=2.0, dora=2.0) == ["ann", "dora"]
    assert made.scheduler.settings.account["vision"].users["dora"] == 2.0
    assert write(ann=3.0, dora=2.0) == ["ann", "dora"]
    assert write(ann=3.0, bob=1.0, dora=2.0) == ["ann", "bob", "dora"]
    made.tick()
    assert not made.store.load(TABLE_SETTINGS)


REFUSALS: list[tuple[Any, type[Exception]]] = [
    (ChangeMembers(CARLA, "science", add=("eve",)), Forbidden),
    (ChangeMembers(CARLA, "chem", add=("eve",)), Forbidden),
    (ChangeMembers(ANN, "vision", add=("eve",)), Forbidden),
    (ChangeMembers(CARLA, "nowhere", add=("eve",)), Forbidden),
    (ChangeMembers(CARLA, "vision"), UsageError),
    (ChangeMembers(CARLA, "vision", add=("*",)), UsageError),
    (ChangeMembers(CARLA, "vision", add=("eve:5",)), UsageError),
    (ChangeMembers(CARLA, "vision", add=("a b",)), UsageError),
    (ChangeMembers(CARLA, "vision", add=("eve",), remove=("nobody",)), NotFound),
    (SetUserLimit(CARLA, "ann", max_gpus=1), Forbidden),
    (SetUserLimit(CARLA, "bob", account="chem", max_gpus=1), Forbidden),
    (SetUserLimit(CARLA, "dora", account="science", max_gpus=1), Forbidden),
    (GiveCredit(CARLA, "science", 5.0), Forbidden),
    (GiveCredit(CARLA, "vision", 5.0), Forbidden),
    (UndoTableSettings(CARLA, 1, ()), Forbidden),
    (Reload(CARLA), Forbidden),
]


@pytest.mark.parametrize(("command", "error"), REFUSALS)
def test_everything_else_is_refused_and_leaves_nothing(command: Any, error: type[Exception]) -> None:
    made = lab()
    (answer,) = made.ask(command)
    assert isinstance(answer, error), answer
    assert not made.scheduler.state.rows[TABLE_SETTINGS]
    assert made.scheduler.settings.account == ACCOUNTS


def test_first_and_last_member_anywhere_are_the_admins() -> None:
    made = Lab(account={"a": AccountSettings("a", coordinators=("carla",)), "b": AccountSettings("b")})
    (answer,) = made.ask(ChangeMembers(CARLA, "a", add=("eve",)))
    assert isinstance(answer, Refused)
    made = Lab(
        account={"a": AccountSettings("a", users={"ann": 1.0}, coordinators=("carla",)), "b": AccountSettings("b")}
    )
    (answer,) = made.ask(ChangeMembers(CARLA, "a", remove=("ann",)))
    assert isinstance(answer, Refused)
    made = Lab(account={"a": AccountSettings("a", users={"*": 1.0}, coordinators=("carla",))})
    (answer,) = made.ask(ChangeMembers(CARLA, "a", add=("ann",)))
    assert isinstance(answer, Refused)


def test_limits_in_the_account_are_theirs_but_not_those_of_an_admin() -> None:
    made = lab()
    ok(made.ask(SetUserLimit(CARLA, "ann", account="nlp", max_gpus=1))[0])
    ok(made.ask(SetUserLimit(CARLA, "ann", account="nlp", max_gpus=2))[0])
    ok(made.ask(SetUserLimit(ROOT, "bob", account="vision", max_jobs=0))[0])
    for command in (
        SetUserLimit(CARLA, "bob", account="vision", max_jobs=9),
        SetUserLimit(CARLA, "bob", account="vision", is_removed=True),
    ):
        assert isinstance(made.ask(command)[0], Forbidden)
    ok(made.ask(SetUserLimit(CARLA, "ann", account="nlp", is_removed=True))[0])
    ok(made.ask(SetUserLimit(ROOT, "bob", account="vision", is_removed=True))[0])
    assert made.scheduler.user_limits() == ()


def test_a_personal_scheduler_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "[account.vision]\nusers = ['ann']\ncoordinators = ['carla']\n"
    (settings,) = {settings_in(text, "config.toml").account["vision"].coordinators}
    assert settings == ("carla",)
    monkeypatch.setattr(paths, "is_system", lambda: False)
    monkeypatch.setattr(reload, "load_settings", lambda *_, **__: Loaded(settings_in(text, "config.toml")))
    with pytest.raises(UsageError, match="account vision has coordinators, but a personal scheduler has one user"):
        reload.SettingsFile("fair").read()


class Loaded:
    """What a file holds, as far as it is looked at."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings
