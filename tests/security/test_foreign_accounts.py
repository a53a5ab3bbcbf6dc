"""Nobody charges an account that they are no member of: every route that gives a job its account, as real users.

The daemon knows who asks from the kernel alone, and looks up Unix groups of that uid, so nothing in a request helps.
"""

from __future__ import annotations

import grp
import json
import pwd
from collections.abc import Callable
from typing import Any

import pytest
from people import ANN, BOB, EVE, NEEDS_ROOT, Person, SystemDaemon

from gpusched.errors import Forbidden, Refused, UsageError

pytestmark = NEEDS_ROOT

GROUP = grp.getgrgid(pwd.getpwnam(EVE).pw_gid).gr_name
CONFIG = f"""
[access]
admin_group = "sys"

[account.physics]
users = ["{ANN}"]

[account.chem]
users = {{ {ANN} = 2, {BOB} = 1 }}

[account.bio]
users = ["{BOB}"]

[account.course]
groups = ["{GROUP}"]

[queue.default]

[queue.rich]
accounts = ["bio"]
operators = ["{ANN}"]
"""
SENTENCE = f"user {ANN} is not a member of account bio, only of chem and physics"
SPEC: dict[str, Any] = {"argv": ["true"], "env": {}, "work_dir": "/tmp", "stdout": "/dev/null", "cpus": 0}


def accounts(person: Person) -> set[str]:
    """Accounts of all jobs of this user."""
    found = person.call("GET", f"/v1/jobs?states=all&users={person.user}")["jobs"]
    return {job["account"] for job in found}


STEP = {key: value for key, value in SPEC.items() if key != "env"}
WANTED = {**SPEC, "account": "bio"}


def update(job: str, **changes: str) -> tuple[str, dict[str, Any]]:
    return "/v1/jobs/update", {"ids": [job], "changes": changes}


ATTEMPTS: dict[str, Callable[[str], tuple[str, dict[str, Any]]]] = {
    "a submission": lambda job: ("/v1/jobs", {"spec": WANTED}),
    "an array": lambda job: ("/v1/jobs", {"spec": {**WANTED, "array": "0-3"}}),
    "a batch": lambda job: ("/v1/jobs", {"spec": WANTED, "batch": ["true", "false"]}),
    "a held job": lambda job: ("/v1/jobs", {"spec": {**WANTED, "hold": True}}),
    "a job that waits for another": lambda job: ("/v1/jobs", {"spec": {**WANTED, "dependency": f"afterany:{job}"}}),
    "a job for a queue of the account": lambda job: ("/v1/jobs", {"spec": {**WANTED, "queue": "rich"}}),
    "a repetition": lambda job: ("/v1/jobs", {"resubmit": [job], "spec": {"account": "bio"}}),
    "an update": lambda job: update(job, account="bio"),
    "an update to the account and its queue": lambda job: update(job, account="bio", queue="rich"),
    "a step of a pipeline": lambda job: (
        "/v1/pipelines",
        {
            "name": "p",
            "steps": [
                {"step": "one", "spec": {**STEP, "account": "chem"}},
                {"step": "two", "spec": {**STEP, "account": "bio"}, "needs": "one"},
            ],
        },
    ),
}


@pytest.mark.parametrize("attempt", ATTEMPTS.values(), ids=ATTEMPTS)
def test_no_job_is_charged_to_a_foreign_account_by(make: Any, attempt: Callable[[str], Any]) -> None:
    ann = make(CONFIG).person(ANN)
    error = ann.refusal("POST", *attempt(ann.submit("true", hold=True, account="physics")))
    assert isinstance(error, Refused)
    assert error.message.removeprefix("step two: ") == SENTENCE
    assert error.hint.replace("account=", "-A ") == "name one of them: -A chem, -A physics"
    assert accounts(ann) == {"physics"}


def test_a_dry_run_refuses_a_foreign_account(make: Any) -> None:
    found = make(CONFIG).person(ANN).call("POST", "/v1/jobs", {"spec": WANTED, "dry_run": True})["dry_run"]
    assert (found["verdict"], found["text"]) == ("refused", SENTENCE)
    assert found["hint"] == "name one of them: -A chem, -A physics"


@pytest.mark.parametrize("extra", [{"user": BOB}, {"uid": 2}, {"groups": [GROUP]}], ids=["user", "uid", "groups"])
def test_a_name_in_the_request_grants_no_membership(make: Any, extra: dict[str, Any]) -> None:
    ann = make(CONFIG).person(ANN)
    error = ann.refusal("POST", "/v1/jobs", {"spec": {**SPEC, "account": "bio", **extra}})
    assert isinstance(error, UsageError)
    error = ann.refusal("POST", "/v1/jobs", {"spec": {**SPEC, "account": "bio", "env": {"USER": BOB, "LOGNAME": BOB}}})
    assert error.message == SENTENCE


def test_groups_of_the_peer_uid_count(make: Any) -> None:
    daemon: SystemDaemon = make(CONFIG)
    ann, eve = daemon.person(ANN), daemon.person(EVE)
    assert eve.call("GET", "/v1/accounts")["own_accounts"] == ["course"]
    eve.submit("true", hold=True)
    assert accounts(eve) == {"course"}
    assert (
        "is not a member of account course"
        in ann.refusal("POST", "/v1/jobs", {"spec": {**SPEC, "account": "course"}}).message
    )


def test_admins_and_operators_cannot_use_foreign_accounts(make: Any) -> None:
    daemon: SystemDaemon = make(CONFIG)
    ann, bob, admin = daemon.person(ANN), daemon.person(BOB), daemon.person("sys")
    error = admin.refusal("POST", "/v1/jobs", {"spec": {**SPEC, "account": "bio"}})
    assert error.message == "user sys is not a member of account bio, nor of any other"
    job = ann.submit("true", hold=True, account="physics")
    error = admin.refusal("POST", "/v1/jobs/update", {"ids": [job], "changes": {"account": "bio"}})
    assert error.message == SENTENCE
    # Of a queue that ann operates; bob is a member of bio and chem, and of no other.
    of_bob = bob.submit("true", hold=True, account="bio", queue="rich")
    error = ann.refusal("POST", "/v1/jobs/update", {"ids": [of_bob], "changes": {"account": "physics"}})
    assert error.message == f"user {BOB} is not a member of account physics, only of bio and chem"
    assert isinstance(ann.refusal("POST", "/v1/jobs", {"resubmit": [of_bob], "spec": {}}), Forbidden)
    assert (accounts(ann), accounts(bob)) == ({"physics"}, {"bio"})


def test_a_removed_member_keeps_their_jobs_and_gets_no_more(make: Any) -> None:
    daemon: SystemDaemon = make(CONFIG)
    bob = daemon.person(BOB)
    job = bob.submit("true", hold=True, account="bio")
    daemon.configure(CONFIG.replace(f'[account.bio]\nusers = ["{BOB}"]', '[account.bio]\nusers = ["root"]'))
    daemon.call("POST", "/v1/reload", {})
    wanted = f"user {BOB} is not a member of account bio, only of chem"
    assert bob.refusal("POST", "/v1/jobs", {"spec": {**SPEC, "account": "bio"}}).message == wanted
    assert bob.refusal("POST", "/v1/jobs", {"resubmit": [job], "spec": {}}).message == wanted
    bob.call("POST", "/v1/jobs/release", {"ids": [job]})
    assert bob.call("GET", f"/v1/wait?ids={job}&timeout_s=60")["jobs"][0]["state"] == "COMPLETED"


def test_refusals_do_not_reveal_private_accounts(make: Any) -> None:
    daemon: SystemDaemon = make(CONFIG.replace("[access]\n", '[access]\nprivate_data = ["accounts"]\n'))
    ann = daemon.person(ANN)
    said = [ann.refusal("POST", "/v1/jobs", {"spec": {**SPEC, "account": name}}) for name in ("bio", "geo")]
    assert said[0].message == said[1].message.replace("geo", "bio")
    assert said[0].hint == said[1].hint
    listed = ann.call("GET", "/v1/accounts")
    assert {row["account"] for row in listed["accounts"]} == {"", "chem", "physics"}
    assert BOB not in json.dumps(listed)
