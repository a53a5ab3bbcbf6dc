"""Which accounts a user may submit to: those that list the user, a Unix group of theirs, or everybody.

An account's members are those that it lists itself; membership is not inherited, neither from the account above nor
from those below. Slurm calls a pair of account and user an association. As long as no account lists anybody, all are
open: such a configuration says how GPUs are shared, not between whom.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from gpusched.model.settings import EVERYBODY, AccountSettings, Settings
from gpusched.model.spelling import closest
from gpusched.model.units import printable
from gpusched.model.value import replace
from gpusched.scheduler.refusal import Refusal
from gpusched.scheduler.words import MOST_CHOICES, choose, name_some, with_value

_BY_NAME, _BY_GROUP, _AS_EVERYBODY = range(3)
"""How an account lists a user, the most specific first."""


def are_restricted(accounts: Mapping[str, AccountSettings]) -> bool:
    """Whether membership counts: as soon as one account lists users or groups."""
    return any(account.users or account.groups for account in accounts.values())


def groups_listed(settings: Settings) -> frozenset[str]:
    """Unix groups that accounts list; who is in them is for the caller to look up."""
    return frozenset(group for account in settings.account.values() for group in account.groups)


def accounts_of(user: str, groups: Collection[str], settings: Settings) -> list[str]:
    """Accounts that the user is a member of, by name.

    Args: groups: the user's Unix groups, of those that accounts list.
    """
    return sorted(_listings(user, groups, settings.account))


def default_account(user: str, groups: Collection[str], settings: Settings) -> str | None:
    """The account of a job that names none: the only one that lists the user; None when there is not exactly one.

    A listing by name goes before one by group, and that before one of everybody.
    """
    found = _listings(user, groups, settings.account)
    best = min(found.values(), default=None)
    names = [name for name, how in found.items() if how == best]
    return names[0] if len(names) == 1 else None


def _listings(user: str, groups: Collection[str], accounts: Mapping[str, AccountSettings]) -> dict[str, int]:
    """How each account that the user is a member of lists the user."""
    if not are_restricted(accounts):
        return dict.fromkeys(accounts, _AS_EVERYBODY)
    found = {}
    for name, account in accounts.items():
        if user in account.users:
            found[name] = _BY_NAME
        elif not set(account.groups).isdisjoint(groups):
            found[name] = _BY_GROUP
        elif EVERYBODY in account.users:
            found[name] = _AS_EVERYBODY
    return found


def account_refusal(
    account: str, user: str, groups: Collection[str], settings: Settings, option: str = "-A"
) -> Refusal | None:
    """Refuse an account that the user is no member of, with the accounts that the user has; None for one of these.

    Asked when a job is given its account, not of jobs that have one: those go on when their user or their account is
    taken out of the settings. A job that names none and has no default is under its user's name.

    Args: option: how the account was typed, `-A` or `account=`.
    """
    if not settings.account:
        return _not_configured(account, user, option)
    own = accounts_of(user, groups, settings)
    if account in own:
        return None
    hint = choose(own, option) if own else _ask_admin(account, user, settings)
    if account in ("", user) and account not in settings.account and len(own) != 1:
        if own:
            return Refusal(f"user {user} is a member of {_some(own)}, so the job must name one", hint)
        return Refusal(f"user {user} is not a member of any account", hint)
    shown = printable(account, 60)
    if account not in settings.account and "accounts" not in settings.access.private_data:
        near = closest(account, own)
        only = f"; user {user} is a member of {_some(own)}" if own else ""
        return Refusal(
            f"there is no account '{shown}'{only}", f"did you mean {with_value(option, near)}?" if near else hint
        )
    others = f"only of {_some(own)}" if own else "nor of any other"
    return Refusal(f"user {user} is not a member of account {shown}, {others}", hint)


def _not_configured(account: str, user: str, option: str) -> Refusal | None:
    if account in ("", user):
        return None
    shown = printable(account, 60)
    return Refusal(
        f"there is no account '{shown}', because none is configured; jobs of {user} count for {user}",
        f"{'leave out -A' if option == '-A' else with_value(option, user)}, or ask an admin to add [account.{shown}] "
        "to the config file",
    )


def _ask_admin(account: str, user: str, settings: Settings) -> str:
    shown = account if account in settings.account and "accounts" not in settings.access.private_data else "NAME"
    return f"ask an admin to add {user} to users of [account.{printable(shown, 60)}] in the config file"


def _some(names: list[str]) -> str:
    return name_some("", names, MOST_CHOICES)


def open_to_all(accounts: Mapping[str, AccountSettings]) -> dict[str, AccountSettings]:
    """The same accounts with everybody as a member, for replays: what is recorded has been submitted already."""
    return {
        name: replace(account, users={EVERYBODY: 1.0, **account.users}, groups=()) for name, account in accounts.items()
    }


Finding = tuple[str, str, str]
"""Path of a setting, a sentence, and what to do."""


def membership_findings(settings: Settings) -> Iterator[Finding]:
    """Accounts that anybody may use because no account says otherwise, and those that nobody may use."""
    accounts = settings.account
    if not are_restricted(accounts):
        if accounts:
            text = f"no account lists users or groups, so any user may submit to {_some(sorted(accounts))}"
            hint = f'list the members of each, such as users = ["ann", "bob"]; users = "{EVERYBODY}" keeps one open'
            yield f"account.{next(iter(accounts))}.users", text, hint
        return
    above = {account.parent for account in accounts.values()}
    for name, account in accounts.items():
        if not (account.users or account.groups or name in above):
            text = f"account {name} has no members, so nobody may submit to it"
            hint = f'list them, such as users = ["ann"], or open it: users = "{EVERYBODY}"'
            yield f"account.{name}.users", text, hint


def unknown_members(
    settings: Settings, is_user: Callable[[str], bool], is_group: Callable[[str], bool]
) -> Iterator[Finding]:
    """Users and groups that accounts list and this machine does not have."""
    for name, account in settings.account.items():
        users = [user for user in account.users if user != EVERYBODY and not is_user(user)]
        groups = [group for group in account.groups if not is_group(group)]
        for key, noun, names in (("users", "user", users), ("groups", "group", groups)):
            if names:
                text = f"account {name} lists {name_some(noun, names, MOST_CHOICES)}, unknown on this machine"
                yield f"account.{name}.{key}", text, f"add the {noun}, or mend the name: getent {_DATABASES[noun]} NAME"


_DATABASES = {"user": "passwd", "group": "group"}
