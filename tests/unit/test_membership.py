"""Who may submit to which account, how others are refused, and every path by which a job gets an account."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from lab import ANN, BOB, ROOT, Lab

from gpusched import access
from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.api.resubmit import read_resubmission
from gpusched.daemon.forecast import dry_run
from gpusched.errors import GpuschedError, Refused
from gpusched.model.commands import (
    Caller,
    PipelineStep,
    Release,
    Reload,
    Reserve,
    ResumePipeline,
    Submit,
    SubmitPipeline,
    Update,
)
from gpusched.model.job import ArraySpec
from gpusched.model.pipeline import StepNeeds
from gpusched.model.queue_settings import AccountSettings, QosSettings, QueueSettings
from gpusched.model.settings import AccessSettings, Settings
from gpusched.model.states import JobState
from gpusched.model.value import replace
from gpusched.ports import JobFilter
from gpusched.scheduler.admission import (
    account_refusal,
    accounts_of,
    default_account,
    membership_findings,
    unknown_members,
)
from gpusched.testing import launch, spec


def account(name: str, *users: str, parent: str | None = None, groups: tuple[str, ...] = ()) -> AccountSettings:
    return AccountSettings(name, parent=parent, users=dict.fromkeys(users, 1.0), groups=groups)


def settings_of(*accounts: AccountSettings, **sections: Any) -> Settings:
    return Settings(account={one.name: one for one in accounts}, **sections)


LABS = (
    account("science"),
    account("physics", "ann", parent="science"),
    account("chem", "ann", "bob", parent="science"),
    account("bio", "bob"),
)
HIDDEN = AccessSettings(private_data=("accounts",))


# --- who is a member ----------------------------------------------------------------------------

MEMBERSHIPS: dict[str, tuple[tuple[AccountSettings, ...], str, tuple[str, ...], list[str]]] = {
    "nobody, where no account is configured": ((), "ann", (), []),
    "a user who is listed": (LABS, "ann", (), ["chem", "physics"]),
    "a user who is not listed": (LABS, "eve", (), []),
    "everybody by `*`": ((*LABS, account("open", "*")), "eve", (), ["open"]),
    "everybody beside one who is listed": ((account("open", "*", "ann"),), "eve", (), ["open"]),
    "a member of a listed group": (
        (*LABS, account("course", groups=("students", "staff"))),
        "eve",
        ("staff",),
        ["course"],
    ),
    "nobody of a group that no account lists": (LABS, "eve", ("physics",), []),
    "not a member of an account above": ((account("top"), account("low", "ann", parent="top")), "ann", (), ["low"]),
    "not a member of an account below": ((account("top", "ann"), account("low", parent="top")), "ann", (), ["top"]),
    "anybody, where no account lists anybody": ((account("a"), account("b")), "eve", (), ["a", "b"]),
    "nobody of an account without members": ((account("a"), account("b", "ann")), "eve", (), []),
    "nobody of one with the user's name": ((account("eve"), account("b", "ann")), "eve", (), []),
    "nobody by name, where an account lists a group alone": (
        (account("a"), account("b", groups=("lab",))),
        "lab",
        (),
        [],
    ),
}


@pytest.mark.parametrize(("accounts", "user", "groups", "wanted"), MEMBERSHIPS.values(), ids=MEMBERSHIPS)
def test_membership_is(accounts: Any, user: str, groups: Any, wanted: list[str]) -> None:
    assert accounts_of(user, groups, settings_of(*accounts)) == wanted


DEFAULTS: dict[str, tuple[tuple[AccountSettings, ...], tuple[str, ...], str | None]] = {
    "no account is configured": ((), (), None),
    "a member of one": ((LABS[1], LABS[3]), (), "physics"),
    "a member of none": ((LABS[3],), (), None),
    "a member of two": (LABS, (), None),
    "listed in one, and another is open": ((LABS[1], account("open", "*")), (), "physics"),
    "listed in one, and in a group of another": ((LABS[1], account("lab", groups=("lab",))), ("lab",), "physics"),
    "in a group of one, and another is open": (
        (account("lab", groups=("lab",)), account("open", "*")),
        ("lab",),
        "lab",
    ),
    "in groups of two": ((account("a", groups=("a",)), account("b", groups=("b",))), ("a", "b"), None),
    "two are open": ((account("a", "*"), account("b", "*")), (), None),
    "the only one lists nobody": ((account("a"),), (), "a"),
    "listed with no shares": ((AccountSettings("x", users={"ann": 0.0}),), (), "x"),
}


@pytest.mark.parametrize(("accounts", "groups", "wanted"), DEFAULTS.values(), ids=DEFAULTS)
def test_the_default_account_of_ann_is(accounts: Any, groups: Any, wanted: str | None) -> None:
    assert default_account("ann", groups, settings_of(*accounts)) == wanted


# --- refusals -----------------------------------------------------------------------------------

ASK_EVE = "ask an admin to add eve to users of [account.{}] in the config file"
MANY = tuple(account(f"a{number}", "ann") for number in range(10))
REFUSALS: dict[str, tuple[Settings, str, str, str, str]] = {
    "another's account": (
        settings_of(*LABS),
        *("ann", "bio"),
        "user ann is not a member of account bio, only of chem and physics",
        "name one of them: -A chem, -A physics",
    ),
    "another's account, by a member of one": (
        settings_of(LABS[1], LABS[3]),
        *("ann", "bio"),
        "user ann is not a member of account bio, only of physics",
        "name it: -A physics",
    ),
    "another's account, by a member of none": (
        settings_of(*LABS),
        *("eve", "bio"),
        "user eve is not a member of account bio, nor of any other",
        ASK_EVE.format("bio"),
    ),
    "an account above one's own": (
        settings_of(*LABS),
        *("ann", "science"),
        "user ann is not a member of account science, only of chem and physics",
        "name one of them: -A chem, -A physics",
    ),
    "no account, by a member of two": (
        settings_of(*LABS),
        *("ann", "ann"),
        "user ann is a member of chem and physics, so the job must name one",
        "name one of them: -A chem, -A physics",
    ),
    "no account, by a member of none": (
        settings_of(*LABS),
        *("eve", "eve"),
        "user eve is not a member of any account",
        ASK_EVE.format("NAME"),
    ),
    "one's own name, by a member of one account": (
        settings_of(LABS[1]),
        *("ann", "ann"),
        "there is no account 'ann'; user ann is a member of physics",
        "name it: -A physics",
    ),
    "an unknown account": (
        settings_of(*LABS),
        *("ann", "biology"),
        "there is no account 'biology'; user ann is a member of chem and physics",
        "name one of them: -A chem, -A physics",
    ),
    "a misspelt account": (
        settings_of(*LABS),
        *("ann", "phisics"),
        "there is no account 'phisics'; user ann is a member of chem and physics",
        "did you mean -A physics?",
    ),
    "an unknown account, by a member of none": (
        settings_of(*LABS),
        *("eve", "biology"),
        "there is no account 'biology'",
        ASK_EVE.format("NAME"),
    ),
    "an account that would harm a terminal": (
        settings_of(LABS[1]),
        *("ann", "\x1b[2J"),
        "there is no account '\\x1b[2J'; user ann is a member of physics",
        "name it: -A physics",
    ),
    "another's account, by a member of more than one reads": (
        settings_of(*MANY, LABS[3]),
        *("ann", "bio"),
        "user ann is not a member of account bio, only of a0, a1, a2, a3, a4, a5, a6, a7 and 2 more",
        "name one of them: -A a0, -A a1, -A a2, -A a3, -A a4, -A a5, -A a6, -A a7 and 2 more",
    ),
}


@pytest.mark.parametrize(("settings", "user", "asked", "text", "hint"), REFUSALS.values(), ids=REFUSALS)
def test_refusals_read(settings: Settings, user: str, asked: str, text: str, hint: str) -> None:
    found = account_refusal(asked, user, (), settings)
    assert found is not None
    assert (found.text, found.hint) == (text, hint)


@pytest.mark.parametrize("user", ["ann", "eve"])
def test_a_refusal_does_not_reveal_hidden_accounts(user: str) -> None:
    settings = settings_of(*LABS, access=HIDDEN)
    theirs, nobodys = (account_refusal(name, user, (), settings) for name in ("bio", "geo"))
    assert theirs is not None
    assert nobodys is not None
    assert theirs.text == nobodys.text.replace("geo", "bio")
    assert theirs.hint == nobodys.hint


# --- every path by which a job gets an account --------------------------------------------------

SENTENCE = "user ann is not a member of account bio, only of chem and physics"
EVE = Caller(1002, "eve")


@pytest.fixture
def lab() -> Lab:
    return Lab(cpus=4, outcome=SimulatedOutcome(runs_s=1000), account={one.name: one for one in LABS})


def texts(answers: list[Any]) -> list[str]:
    return [answer.message if isinstance(answer, GpuschedError) else "" for answer in answers]


def by_submission(lab: Lab) -> list[str]:
    return texts(lab.ask(lab.submission(account="bio")))


def by_array(lab: Lab) -> list[str]:
    return texts(lab.ask(lab.submission(account="bio", array=ArraySpec("0-3"))))


def by_one_line_of_a_batch(lab: Lab) -> list[str]:
    one = spec(launch=launch("true"), account="chem")
    return texts(lab.ask(Submit(ANN, [one, replace(one, account="bio"), one], {})))


def by_step_of_a_pipeline(lab: Lab) -> list[str]:
    steps = [
        PipelineStep("one", spec(account="chem"), StepNeeds(), "line 1"),
        PipelineStep("two", spec(account="bio"), StepNeeds(), "line 5"),
    ]
    return [text.removeprefix("line 5: ") for text in texts(lab.ask(SubmitPipeline(ANN, "train", "", steps, {})))]


def by_dry_run(lab: Lab) -> list[str]:
    return [dry_run(spec(account="bio"), ANN, lab.scheduler)().text]


@pytest.mark.parametrize("path", [by_submission, by_array, by_one_line_of_a_batch, by_step_of_a_pipeline, by_dry_run])
def test_no_job_is_submitted_to_a_foreign_account(lab: Lab, path: Callable[[Lab], list[str]]) -> None:
    assert path(lab) == [SENTENCE]
    assert lab.store.jobs(JobFilter()) == []


@pytest.mark.parametrize("caller", [ANN, ROOT], ids=["its owner", "root"])
@pytest.mark.parametrize("array", [None, ArraySpec("0-3")], ids=["a job", "an array"])
def test_an_update_moves_no_job_to_a_foreign_account(lab: Lab, caller: Caller, array: ArraySpec | None) -> None:
    job_id = lab.submit(hold=True, account="chem", array=array)
    assert texts(lab.ask(Update(caller, (job_id,), {"account": "bio"}))) == [SENTENCE]
    assert lab.job(job_id).spec.account == "chem"
    assert texts(lab.ask(Update(caller, (job_id,), {"account": "physics"}))) == [""]
    assert lab.job(job_id).spec.account == "physics"


def test_an_update_of_several_jobs_moves_none_when_one_owner_is_no_member(lab: Lab) -> None:
    of_ann = lab.submit(hold=True, account="chem")
    (answer,) = lab.ask(lab.submission(BOB, hold=True, account="chem"))
    (of_bob,) = answer["ids"]
    assert texts(lab.ask(Update(ROOT, (of_bob, of_ann), {"account": "bio"}))) == [SENTENCE]
    assert lab.job(of_bob).spec.account == "chem"


@pytest.mark.parametrize("caller", [ROOT, EVE], ids=["root", "a user of no account"])
def test_an_admin_is_a_member_only_where_listed(lab: Lab, caller: Caller) -> None:
    user = caller.user
    assert texts(lab.ask(lab.submission(caller, account="bio"), lab.submission(caller))) == [
        f"user {user} is not a member of account bio, nor of any other",
        f"user {user} is not a member of any account",
    ]


def test_a_job_without_an_account_gets_the_default_of_its_user(lab: Lab) -> None:
    lab.scheduler.settings = settings_of(*LABS[:2], account("open", "*"), node=lab.settings.node)
    assert lab.job(lab.submit()).spec.account == "physics"
    (answer,) = lab.ask(lab.submission(EVE))
    assert lab.job(answer["ids"][0]).spec.account == "open"
    job_id = lab.submit(hold=True, account="open")
    lab.ask(Update(ANN, (job_id,), {"account": ""}))
    assert lab.job(job_id).spec.account == "physics"


# --- Unix groups --------------------------------------------------------------------------------


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[int]]:
    """Uids by group, in place of the system's user database."""
    members: dict[str, set[int]] = {"students": {EVE.uid}}
    monkeypatch.setattr(
        access, "look_up_groups", lambda uid, names: {name for name in names if uid in members.get(name, ())}
    )
    return members


def test_members_of_a_group_may_submit_while_they_are_in_it(lab: Lab, groups: dict[str, set[int]]) -> None:
    lab.scheduler.settings = settings_of(*LABS, account("course", groups=("students",)), node=lab.settings.node)
    # Each request has a caller of its own.
    (made,) = lab.ask(lab.submission(Caller(EVE.uid, "eve"), hold=True))
    assert lab.job(made["ids"][0]).spec.account == "course"
    assert texts(lab.ask(lab.submission(account="course"))) == [
        "user ann is not a member of account course, only of chem and physics"
    ]
    groups["students"].clear()
    assert texts(lab.ask(lab.submission(Caller(EVE.uid, "eve"), account="course"))) == [
        "user eve is not a member of account course, nor of any other"
    ]
    assert lab.job(made["ids"][0]).state is JobState.PENDING


def test_an_update_by_an_admin_checks_the_groups_of_the_owner(lab: Lab, groups: dict[str, set[int]]) -> None:
    groups["students"] = {ROOT.uid}
    lab.scheduler.settings = settings_of(*LABS, account("course", groups=("students",)), node=lab.settings.node)
    job_id = lab.submit(hold=True, account="chem")
    (refused,) = lab.ask(Update(Caller(0, "root"), (job_id,), {"account": "course"}))
    assert refused.message == "user ann is not a member of account course, only of chem and physics"
    groups["students"] = {ANN.uid}
    lab.ask(Update(Caller(0, "root"), (job_id,), {"account": "course"}))
    assert lab.job(job_id).spec.account == "course"


def test_groups_are_not_looked_up_when_no_account_lists_one(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(access, "look_up_groups", lambda uid, names: asked.extend(names))
    lab.submit(account="chem")
    assert asked == []


# --- members who are taken out ------------------------------------------------------------------


def take_out(lab: Lab, user: str) -> Any:
    accounts = {
        name: replace(one, users={name: shares for name, shares in one.users.items() if name != user})
        for name, one in lab.scheduler.settings.account.items()
    }
    wanted = replace(lab.scheduler.settings, account=accounts)
    lab.config = lambda: wanted
    (answer,) = lab.ask(Reload(ROOT))
    return answer


def test_jobs_of_a_removed_member_continue_and_new_ones_are_refused(lab: Lab) -> None:
    running = lab.submit(account="chem")
    held = lab.submit(account="chem", hold=True, array=ArraySpec("0-1"))
    lab.tick(1)
    take_out(lab, "ann")
    assert texts(lab.ask(lab.submission(account="chem"))) == [
        "user ann is not a member of account chem, nor of any other"
    ]
    assert texts(lab.ask(Update(ANN, (held,), {"time_limit_s": 60}), Release(ANN, (held,)))) == ["", ""]
    lab.tick(1)
    assert lab.job(running).state is JobState.RUNNING
    assert {job.state for job in lab.store.jobs(JobFilter()) if job.array_id == held} == {JobState.RUNNING}
    assert {job.spec.account for job in lab.store.jobs(JobFilter())} == {"chem"}


@pytest.mark.parametrize("changes", [{"queue": "rich"}, {"qos": "high"}, {"reservation": "talk"}], ids=str)
def test_a_former_account_opens_no_other_queue_qos_or_reservation(changes: dict[str, str]) -> None:
    queues = {"default": QueueSettings("default"), "rich": QueueSettings("rich", accounts=("chem",))}
    qos = {"high": QosSettings("high", tier=1, accounts=("chem",))}
    lab = Lab(outcome=SimulatedOutcome(runs_s=1000), account={one.name: one for one in LABS}, queue=queues, qos=qos)
    lab.ask(Reserve(ROOT, "talk", start_at=lab.clock.now() + 1e5, duration_s=600.0, gpus=1, accounts=("chem",)))
    before, after = (lab.submit(account="chem", hold=True, time_limit_s=60) for _ in range(2))
    assert texts(lab.ask(Update(ANN, (before,), changes))) == [""]
    take_out(lab, "ann")
    (refused,) = lab.ask(Update(ANN, (after,), changes))
    assert refused.message == "user ann is not a member of account chem, nor of any other"
    # What it has it keeps, and it may leave.
    assert texts(lab.ask(Update(ANN, (before,), {**changes, "nice": 5}))) == [""]
    assert texts(lab.ask(Update(ANN, (before,), {"reservation": None}))) == [""]


def test_a_queue_named_like_the_account_grants_no_membership() -> None:
    queues = {"default": QueueSettings("default"), "bio": QueueSettings("bio")}
    lab = Lab(outcome=SimulatedOutcome(runs_s=1000), account={one.name: one for one in LABS}, queue=queues)
    job_id = lab.submit(account="chem", queue="bio", hold=True)
    (refused,) = lab.ask(Update(ANN, (job_id,), {"account": "bio"}))
    assert refused.message == SENTENCE


def test_a_refused_update_suggests_a_command(lab: Lab) -> None:
    job_id = lab.submit(account="chem", hold=True)
    (refused,) = lab.ask(Update(ANN, (job_id,), {"account": "bio"}))
    assert refused.hint == "name one of them: account=chem, account=physics"
    lab.scheduler.settings = settings_of(node=lab.settings.node)
    (answer,) = lab.ask(Update(ANN, (job_id,), {"account": "bio"}))
    assert answer["notes"] == ["no accounts are configured, so account bio is just a name; use counts for ann"]


def test_a_job_of_a_removed_account_can_still_be_changed(lab: Lab) -> None:
    job_id = lab.submit(account="physics", hold=True)
    lab.scheduler.settings = settings_of(LABS[2], node=lab.settings.node)
    assert texts(lab.ask(Update(ANN, (job_id,), {"time_limit_s": 60}))) == [""]
    assert (lab.job(job_id).spec.account, lab.job(job_id).spec.time_limit_s) == ("physics", 60)
    lab.ask(Update(ANN, (job_id,), {"account": ""}))
    assert lab.job(job_id).spec.account == "chem"


def test_a_repeat_in_a_former_account_is_refused_until_another_is_named(lab: Lab) -> None:
    job_id = lab.submit(account="physics")
    lab.scheduler.settings = settings_of(account("physics", "bob"), LABS[2], node=lab.settings.node)

    def again(**changes: Any) -> list[str]:
        made = read_resubmission([lab.job(job_id)], changes, ANN, lab.scheduler.settings, lab.store)
        return texts(lab.ask(Submit(ANN, made.specs, made.payloads, origins=[str(job_id)])))

    assert again() == ["user ann is not a member of account physics, only of chem"]
    assert again(account="chem") == [""]


def test_a_pipeline_is_not_resumed_in_a_former_account(lab: Lab) -> None:
    lab.outcome = SimulatedOutcome(runs_s=1, exit_code=1)
    step = PipelineStep("one", spec(account="physics", launch=launch("true")), StepNeeds(), "line 1")
    (answer,) = lab.ask(SubmitPipeline(ANN, "train", "", [step], {"0" * 64: b""}))
    lab.tick(5)
    lab.tick(5)
    assert lab.job(int(answer["jobs"]["one"])).state is JobState.FAILED
    take_out(lab, "ann")
    number = int(answer["pipeline"].removeprefix("p"))
    assert texts(lab.ask(ResumePipeline(ANN, number))) == [
        "step one: user ann is not a member of account physics, nor of any other"
    ]


# --- what an admin is told ----------------------------------------------------------------------

OPEN = "no account lists users or groups, so any user may submit to a and b"
FINDINGS: dict[str, tuple[tuple[AccountSettings, ...], list[tuple[str, str]]]] = {
    "none, without accounts": ((), []),
    "none, where each has members": ((account("a", "ann"), account("b", "*"), account("c", groups=("lab",))), []),
    "none of an account above others": ((account("top"), account("a", "ann", parent="top")), []),
    "all open": ((account("a"), account("b")), [("account.a.users", OPEN)]),
    "one closed": (
        (account("a", "ann"), account("b")),
        [("account.b.users", "account b has no members, so no one can submit to it")],
    ),
}


@pytest.mark.parametrize(("accounts", "wanted"), FINDINGS.values(), ids=FINDINGS)
def test_findings_are_reported(accounts: Any, wanted: list[tuple[str, str]]) -> None:
    assert [(path, text) for path, text, _ in membership_findings(settings_of(*accounts))] == wanted


def test_unknown_members_are_named() -> None:
    settings = settings_of(account("a", "ann", "bbo", "*", "eev", groups=("lab", "lob")), account("b", "ann"))
    found = unknown_members(settings, {"ann"}.__contains__, {"lab"}.__contains__)
    assert [(path, text) for path, text, _ in found] == [
        ("account.a.users", "account a lists users bbo and eev, unknown on this machine"),
        ("account.a.groups", "account a lists group lob, unknown on this machine"),
    ]


def test_a_reload_warns_of_accounts_that_are_closed_or_open_to_all(lab: Lab) -> None:
    assert "notes" not in take_out(lab, "nobody")
    answer = take_out(lab, "ann")
    assert [note.partition(";")[0] for note in answer["notes"]] == [
        "account physics has no members, so no one can submit to it"
    ]
    assert json.dumps(answer)
    assert take_out(lab, "bob")["notes"][0].startswith("no account lists users or groups, so any user may submit")


def test_an_old_config_without_members_stays_open_until_one_is_listed(lab: Lab) -> None:
    lab.scheduler.settings = settings_of(account("a"), account("b"), node=lab.settings.node)
    assert lab.job(lab.submit(account="b")).spec.account == "b"
    lab.scheduler.settings = settings_of(account("a", "bob"), account("b"), node=lab.settings.node)
    with pytest.raises(Refused, match="user ann is not a member of account b, nor of any other"):
        lab.submit(account="b")
