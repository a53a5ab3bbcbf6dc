"""Accounts and their members, whatever the configuration: who is refused, and where a job can be."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from lab import ANN, BOB, ROOT, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.model.commands import Caller, Update
from gpusched.model.job import ArraySpec
from gpusched.model.queue_settings import EVERYBODY, AccountSettings
from gpusched.model.settings import Settings
from gpusched.model.value import replace
from gpusched.ports import JobFilter
from gpusched.scheduler.admission import account_refusal, accounts_of, are_restricted, default_account, open_to_all

USERS = ("ann", "bob", "eve")
GROUPS = ("lab", "course")
NAMES = ("vision", "theory", "chem", "ann")
SOME_GROUPS = st.sets(st.sampled_from(GROUPS))


@st.composite
def configurations(draw: Any) -> Settings:
    accounts = {}
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True)):
        users = draw(st.dictionaries(st.sampled_from((*USERS, EVERYBODY)), st.floats(0.5, 4.0), max_size=3))
        parent = draw(st.sampled_from([None, *accounts]))
        accounts[name] = AccountSettings(name, parent=parent, users=users, groups=tuple(sorted(draw(SOME_GROUPS))))
    return Settings(account=accounts)


@given(configurations(), st.sampled_from(USERS), SOME_GROUPS, st.sampled_from((*NAMES, "physics")))
def test_a_user_is_refused_exactly_without_a_listing_account(settings, user, groups, asked):
    account = settings.account.get(asked)
    if not settings.account:
        is_member = True  # it is a label
    elif account is None:
        is_member = False
    else:
        is_listed = user in account.users or EVERYBODY in account.users or bool(groups & set(account.groups))
        is_member = is_listed or not are_restricted(settings.account)
    found = account_refusal(asked, user, groups, settings)
    assert (found is None) == is_member
    if found is not None and settings.account:
        own = accounts_of(user, groups, settings)
        assert all(name in f"{found.text} {found.hint}" for name in own)
        assert found.hint.startswith(("name ", "did you mean ") if own else "ask an admin to add")


@given(configurations(), st.sampled_from(USERS), SOME_GROUPS)
def test_the_default_account_is_never_refused(settings, user, groups):
    chosen = default_account(user, groups, settings)
    assert chosen is None or account_refusal(chosen, user, groups, settings) is None
    own = accounts_of(user, groups, settings)
    assert chosen is not None or len(own) != 1


@given(configurations(), st.sampled_from(USERS), st.sampled_from(NAMES))
def test_parent_accounts_do_not_affect_membership(settings, user, asked):
    flat = replace(settings, account={name: replace(one, parent=None) for name, one in settings.account.items()})
    assert account_refusal(asked, user, (), settings) == account_refusal(asked, user, (), flat)


@given(configurations(), st.sampled_from(USERS))
def test_a_replay_refuses_no_existing_account_and_keeps_shares(settings, user):
    opened = replace(settings, account=open_to_all(settings.account))
    for name, one in settings.account.items():
        assert account_refusal(name, user, (), opened) is None
        assert {**opened.account[name].users, **one.users} == opened.account[name].users


SUBMIT = st.tuples(st.just("submit"), st.integers(0, 2), st.sampled_from(("", *NAMES)), st.booleans())
UPDATE = st.tuples(st.just("update"), st.integers(0, 2), st.sampled_from(("", *NAMES)), st.integers(0, 5))
RELOAD = st.tuples(st.just("reload"), configurations())


@given(configurations(), st.lists(SUBMIT | UPDATE | RELOAD, max_size=12))
def test_no_job_gets_an_account_its_user_is_not_a_member_of(settings, steps):
    lab = Lab(cpus=1, outcome=SimulatedOutcome(runs_s=1000), account=settings.account)
    accounts = {}
    for kind, *words in steps:
        if kind == "reload":
            lab.scheduler.settings = replace(lab.scheduler.settings, account=words[0].account)
        elif kind == "submit":
            array = ArraySpec("0-1") if words[2] else None
            lab.ask(lab.submission((ANN, BOB, ROOT)[words[0]], account=words[1], array=array, hold=True))
        else:
            lab.ask(
                Update(
                    Caller(*((1000, "ann"), (1001, "bob"), (0, "root"))[words[0]]), (words[2],), {"account": words[1]}
                )
            )
        jobs = lab.store.jobs(JobFilter())
        in_force = lab.scheduler.settings
        for job in jobs:
            # A task that gets a row of its own keeps the account of its array.
            if job.spec.account not in (accounts.get(job.id), accounts.get(job.array_id)):
                assert account_refusal(job.spec.account, job.user, (), in_force) is None, (kind, words)
        accounts = {job.id: job.spec.account for job in jobs}
