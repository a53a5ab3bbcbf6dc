"""sacctmgr: accounts, users and qualities of service in Slurm's columns; nothing is changed."""

from __future__ import annotations

import pytest
from golden_cases import case, check, check_table
from hypothesis import given
from hypothesis import strategies as st
from slurm_lab import SlurmLab, user

from gpusched.addons.slurm.command import CommandError
from gpusched.addons.slurm.sacctmgr import _TABLES, _columns, _entity, _Table, _Where

DIFFERS = {
    "265-sacctmgr-assoc": "root is no user of an account, physics has 1 share, and QOSs are open to whole accounts",
    "266-sacctmgr-qos": "QOSs here have no grace time of their own, and capped has other limits in the test's settings",
}


def test_prints_the_columns_of_slurm(lab: SlurmLab) -> None:
    compared = [case("sacctmgr", 265), case("sacctmgr", 266)]
    check_table("sacctmgr", DIFFERS, compared)
    for golden in compared:
        done = check(lab, golden, DIFFERS)
        titles = 1 if "-P" in golden.command else 2
        assert done.out.splitlines()[:titles] == golden.out.splitlines()[:titles]


def test_shows_limits_and_priorities_of_qualities_of_service(lab: SlurmLab) -> None:
    form = "name,priority,preemptmode,maxjobspu,maxsubmitpu,maxtrespu,maxwall,usagefactor"
    assert lab.ok(f"sacctmgr -nP show qos format={form}") == (
        "normal|0|cluster|||||1.000000\n"
        "urgent|100|cluster|||||1.000000\n"
        "capped|0|cluster||2|gres/gpu=2|00:10:00|1.000000\n"
    )
    assert lab.ok("sacctmgr -nP list qos urgent format=name") == "urgent\n"
    assert lab.ok("sacctmgr -nP list qos where name=capped,urgent format=name") == "urgent\ncapped\n"


def test_shows_accounts_with_their_users(lab: SlurmLab) -> None:
    me = user()
    assert lab.ok("sacctmgr -nP show assoc format=cluster,account,user,share").splitlines()[1:] == [
        "lab|chem||1",
        "lab|chem|bob|1",
        "lab|physics||1",
        f"lab|physics|{me}|1",
    ]
    assert lab.ok("sacctmgr -nP show account format=account") == "root\nchem\nphysics\n"
    assert lab.ok("sacctmgr -nP list account chem withassoc format=account,user") == "chem|\nchem|bob\n"
    assert lab.ok("sacctmgr -nP show user bob") == "bob|chem|None\n"
    assert lab.ok("sacctmgr -n list user bob format=account%-9,user%4") == "chem       bob \n"


def test_shows_the_cluster_and_what_is_tracked(lab: SlurmLab) -> None:
    assert lab.ok("sacctmgr -nP list clusters format=cluster,controlhost,nodecount") == "lab|node1|1\n"
    assert lab.ok("sacctmgr -nP list cluster where cluster=other") == ""
    assert "gres|gpu|1001\n" in lab.ok("sacctmgr -nP show tres")
    assert lab.ok("sacctmgr -p show tres").splitlines()[0] == "Type|Name|ID|"


def test_open_ondemand_finds_accounts_and_qualities_of_service(lab: SlurmLab) -> None:
    line = f"sacctmgr -nP show users withassoc format=account,qos where user={user()} cluster=lab"
    assert lab.ok(line) == "physics|capped,normal,urgent\n"


def test_snakemake_finds_the_account_of_its_user(lab: SlurmLab) -> None:
    found = lab.ok(f'sacctmgr -n -s list user "{user()}" format=account%256')
    assert found.split() == ["physics"]


WITH = "sacctmgr: error: an administrator changes them with: "


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *(
            (words, f"{words.split()[0]}: sacctmgr only shows accounts and qualities of service\n{WITH}{way}")
            for words, way in (
                ("add account name=new", "gctl account add NAME KEY=VALUE"),
                ("modify qos normal set priority=3", "gctl qos modify NAME KEY=VALUE"),
                ("delete user bob", "gctl account members NAME remove=USER"),
                ("create user bob account=chem", "gctl account members NAME add=USER"),
                ("load file", "gctl account|qos modify NAME KEY=VALUE"),
            )
        ),
        ("frobnicate", "Invalid keyword: frobnicate"),
        ("show", "No valid entity in show command"),
        ("show nosuch", "No valid entity in show command: nosuch"),
        ("show qos format=name,nosuch", "Unknown field 'nosuch'"),
        ("show qos format=name%x", 'Invalid width of field "name%x"'),
        ("show assoc where colour=red", "Unknown condition: colour=red"),
    ],
)
def test_bad_words_and_changes_are_refused(lab: SlurmLab, words: str, message: str) -> None:
    done = lab.type(f"sacctmgr {words}")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"sacctmgr: error: {message}\n")


def test_an_unknown_option_is_refused(lab: SlurmLab) -> None:
    done = lab.type("sacctmgr --nosuch show qos")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("sacctmgr: unrecognized option '--nosuch'\n")


@given(st.lists(st.text("wheruserqosformat=,%-1 x", max_size=14), max_size=4), st.sampled_from(sorted(_TABLES)))
def test_any_words_are_read_or_refused(words: list[str], entity: str) -> None:
    code = 1
    try:
        _columns(_Table("Name 10 name\nQOS 5 qos", "name"), _Where(entity, words, False))
    except CommandError as error:
        code = error.code
    assert code == 1


def test_entities_have_singular_plural_and_short_names() -> None:
    words = ("assoc", "associations", "user", "users", "acc", "account", "accounts", "qos", "clusters", "tres")
    assert [_entity(word) for word in words] == [
        *("association", "association", "user", "user", "account", "account", "account", "qos", "cluster", "tres")
    ]
    assert _entity("x") is _entity("") is None
