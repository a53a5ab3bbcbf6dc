"""Queues, QOS, accounts, licenses and plug-ins of the config file, and how they may contradict each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpusched.config import SettingsError, load_settings, problems_in
from gpusched.errors import UsageError
from gpusched.model.queue_settings import AccountSettings, QosSettings, QueueSettings

LAB = """
[default]
queue = "batch"
qos = "normal"

[queue.lab]
max_gpus = 8

[queue.vision]
parent = "lab"
guaranteed_gpus = 4
cells = ["4"]
weight = 2
max_gpus_per_user = 6
users = ["ann", "bob"]

[queue.batch]
parent = "lab"
order = "sjf"
max_time_s = 86400

[qos.normal]
[qos.urgent]
tier = 10
preempts = ["normal"]
max_running_per_user = 1

[account.physics]
shares = 3
users = {ann = 2, bob = 1.5}

[account."theory.group"]
parent = "physics"

[license]
matlab = 3

[plugins]
load = ["lab_rules"]

[node]
labels = ["nvlink", "imagenet"]
resources = {fpga = 2}
"""


def written(folder: Path, text: str) -> str:
    path = folder / "config.toml"
    path.write_text(text)
    return str(path)


def problems(folder: Path, text: str) -> list[UsageError]:
    return problems_in(written(folder, text), {})


def only(folder: Path, text: str) -> UsageError:
    (problem,) = problems(folder, text)
    assert "\n" not in problem.message
    assert problem.hint
    return problem


def test_a_whole_lab_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, LAB)
    loaded = load_settings(path, {})
    settings = loaded.settings
    assert settings.queue["vision"] == QueueSettings(
        "vision",
        parent="lab",
        guaranteed_gpus=4.0,
        cells=("4",),
        weight=2.0,
        max_gpus_per_user=6.0,
        users=("ann", "bob"),
    )
    assert settings.queue["batch"].max_time_s == 86400
    assert settings.qos == {
        "normal": QosSettings("normal"),
        "urgent": QosSettings("urgent", tier=10, preempts=("normal",), max_running_per_user=1),
    }
    assert settings.account == {
        "physics": AccountSettings("physics", shares=3.0, users={"ann": 2, "bob": 1.5}),
        "theory.group": AccountSettings("theory.group", parent="physics"),
    }
    assert settings.license == {"matlab": 3}
    assert settings.plugins == ("lab_rules",)
    assert settings.node.labels == ("nvlink", "imagenet")
    assert settings.node.resources == {"fpga": 2}
    rows = {row[0]: row[1:] for row in loaded.values()}
    assert rows["queue.vision.weight"] == (2.0, f"file {path}, line 13")
    assert rows["queue.vision.max_cpus"] == (None, "default")
    assert rows["license.matlab"] == (3, f"file {path}, line 36")
    assert rows["plugins.load"] == (("lab_rules",), f"file {path}, line 39")


MEMBERS = {
    "a list": ('users = ["ann", "bob"]', {"ann": 1.0, "bob": 1.0}),
    "a table": ("users = {ann = 2, bob = 1}", {"ann": 2.0, "bob": 1.0}),
    "everybody": ('users = "*"', {"*": 1.0}),
    "everybody, one with more shares": ('users = {"*" = 1, ann = 3}', {"*": 1.0, "ann": 3.0}),
    "everybody in a list": ('users = ["*"]', {"*": 1.0}),
    "nobody": ("users = []", {}),
}


@pytest.mark.parametrize(("line", "users"), MEMBERS.values(), ids=MEMBERS)
def test_members_of_an_account_are_written_as(line, users, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(f'[account.x]\n{line}\ngroups = ["lab"]\n')
    assert load_settings(str(path), {}).settings.account["x"] == AccountSettings("x", users=users, groups=("lab",))


WRONG = {
    "a negative weight": ("[queue.default]\nweight = -1", 2, "queue.default.weight is -1; it must be a number above 0"),
    "no weight at all": ("[queue.default]\nweight = 0", 2, "queue.default.weight is 0; it must be a number above 0"),
    "a negative guarantee": ("[queue.default]\n\nguaranteed_gpus = -2", 3, "it must be a number of at least 0"),
    "a factor above 1": ("[queue.default]\nfactor = 1.5", 2, "at least 0 and at most 1"),
    "an order that is none": ("[queue.default]\norder = 'lifo'", 2, "one of response_ratio, multifactor, fifo"),
    "a cell without cards": ("[queue.default]\ncells = ['n1:']", 2, "a list of strings such as '4'"),
    "a text for a number": ("[queue.default]\nmax_gpus = 'many'", 2, "it must be a number"),
    "a fraction for a count": ("[qos.x]\ntier = 1.5", 2, "it must be a whole number"),
    "shares of nothing": ("[account.x]\nshares = 0", 2, "above 0"),
    "a user with negative shares": ("[account.x]\nusers = {ann = -1}", 2, "a table of names and shares above 0"),
    "a user in words": ("[account.x]\nusers = {ann = 'two'}", 2, 'table of names and shares above 0, or "*"'),
    "a user by number": (
        "[account.x]\nusers = [1000]",
        2,
        'it must be a list of names, a table of names and shares above 0, or "*"',
    ),
    "one user as a text": ("[account.x]\nusers = 'ann'", 2, "account.x.users is 'ann'; it must be a list of names"),
    "a user of two words": ("[account.x]\nusers = ['ann bob']", 2, "a list of names, a table of names and shares"),
    "a group as a text": ("[account.x]\ngroups = 'lab'", 2, "account.x.groups is 'lab'; it must be a list of names"),
    "a negative license": (
        "[license]\nmatlab = -1",
        2,
        "license.matlab is -1; it must be a whole number of at least 0",
    ),
    "half a license": ("[license]\nmatlab = 0.5", 2, "a whole number"),
    "a plug-in that is no list": ("[plugins]\nload = 'x'", 2, "a list of names of Python modules"),
    "an unknown key": ("[queue.default]\n# so\nwieght = 2", 3, "unknown setting queue.default.wieght"),
    "a queue that is no table": ("[queue]\ndefault = 3", 2, "write [queue.default] before its keys"),
    "a name of two words": ('[queue."a b"]', 1, "'a b' cannot be the name of a queue"),
    "an unknown key of plugins": ("[plugins]\nlaod = []", 2, "unknown setting plugins.laod"),
    "a weight in the weights": ("[priority]\nweight_age = -0.5", 2, "priority.weight_age is -0.5"),
}


@pytest.mark.parametrize(("text", "line", "words"), WRONG.values(), ids=WRONG)
def test_wrong_values_are_refused_with_file_and_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    problem = only(tmp_path, text + "\n")
    assert problem.message.startswith(f"file {tmp_path}/config.toml, line {line}: ")
    assert words in problem.message
    with pytest.raises(UsageError) as caught:
        load_settings(f"{tmp_path}/config.toml", {})
    assert caught.value.message == problem.message


CONTRADICTIONS = {
    "queues in a circle": (
        "[queue.default]\n[queue.a]\nparent = 'b'\n[queue.b]\nparent = 'a'",
        3,
        "the queues form a cycle: a -> b -> a",
    ),
    "a queue above itself": ("[queue.default]\nparent = 'default'", 2, "form a cycle: default -> default"),
    "accounts in a circle": (
        "[account.a]\nparent = 'c'\n[account.b]\nparent = 'a'\n[account.c]\nparent = 'b'",
        2,
        "form a cycle: a -> c -> b -> a",
    ),
    "an unknown parent": (
        "[queue.default]\n[queue.vision]\nparent = 'defualt'",
        3,
        "queue vision is below defualt, which does not exist",
    ),
    "an unknown account above": ("[account.a]\nparent = 'zzz'", 2, "account a is below zzz, which does not exist"),
    "a guarantee above the maximum": (
        "[queue.default]\nguaranteed_gpus = 4\nmax_gpus = 2",
        2,
        "queue default is guaranteed 4 gpus and may hold at most 2",
    ),
    "children that are guaranteed more than their parent": (
        "[default]\nqueue = 'a'\n[queue.top]\nguaranteed_gpus = 4\n"
        "[queue.a]\nparent = 'top'\nguaranteed_gpus = 3\n[queue.b]\nparent = 'top'\nguaranteed_gpus = 2",
        4,
        "the queues below top are guaranteed 5 GPUs, but it has only 4",
    ),
    "children that are guaranteed more than their parent may hold": (
        "[default]\nqueue = 'a'\n[queue.top]\nmax_mem_mib = 100\n[queue.a]\nparent = 'top'\nguaranteed_mem_mib = 200",
        4,
        "but it may hold at most 100",
    ),
    "a limit of a user above that of all": (
        "[queue.default]\nmax_gpus = 2\nmax_gpus_per_user = 3",
        3,
        "max_gpus_per_user of queue default is 3, but max_gpus is 2",
    ),
    "a limit of a job above that of all": (
        "[qos.x]\nmax_gpus = 2\nmax_gpus_per_job = 3",
        3,
        "per_job of QOS x is 3",
    ),
    "more jobs of a user than of all": (
        "[queue.default]\nmax_jobs = 2\nmax_jobs_per_user = 3",
        3,
        "max_jobs_per_user of queue default is 3, but max_jobs is 2",
    ),
    "a limit of a job above that of a user": (
        "[queue.default]\nmax_gpus_per_job = 3\nmax_gpus_per_user = 2",
        2,
        "max_gpus_per_job of queue default is 3, but max_gpus_per_user is 2",
    ),
    "a limit of a job above what the queue above may hold": (
        "[queue.top]\nmax_gpus = 2\n[queue.mid]\nparent = 'top'\n[queue.default]\nparent = 'mid'\nmax_gpus_per_job = 4",
        7,
        "max_gpus_per_job of queue default is 4, but queue top above it may hold at most 2",
    ),
    "more running jobs of a user than jobs": (
        "[qos.x]\nmax_jobs_per_user = 2\nmax_running_per_user = 3",
        3,
        "max_running_per_user of QOS x is 3, but max_jobs_per_user is 2",
    ),
    "a default queue that is misspelt": (
        "[default]\nqueue = 'bacth'\n[queue.batch]",
        2,
        "default.queue is bacth, which does",
    ),
    "promises below a queue with a dot in its name": (
        "[default]\nqueue = 'a'\n[queue.'lab.x']\n\nguaranteed_gpus = 1\n"
        "[queue.a]\nparent = 'lab.x'\nguaranteed_gpus = 2",
        5,
        "the queues below lab.x are guaranteed 2 GPUs, but it has only 1",
    ),
    "a default QOS where there is none": (
        "[default]\nqos = 'normal'",
        2,
        "default.qos is normal, which does not exist",
    ),
    "processes are ended without a word": (
        "[foreign]\nkill_after_s = 60",
        2,
        "foreign processes would be killed without alerting",
    ),
    "a queue that is exempt and is none": (
        "[queue.default]\n[foreign]\nexempt_queues = ['defualt']",
        3,
        "exempt_queues names defualt, which does not exist",
    ),
    "a QOS for an unknown account": ("[account.a]\n[qos.x]\naccounts = ['b']", 3, "qos x is for account b"),
    "cells above the maximum": ("[queue.default]\nmax_gpus = 4\ncells = ['4', 'n1:2']", 3, "are 6 GPUs"),
    "an unknown default queue": ("[queue.batch]", 1, "default.queue is default, which does not exist"),
    "a default queue that is no leaf": (
        "[queue.default]\n[queue.a]\nparent = 'default'",
        1,
        "which has queues below it and takes no jobs itself",
    ),
    "an unknown default QOS": ("[default]\nqos = 'norml'\n[qos.normal]", 2, "default.qos is norml"),
    "a QOS that preempts an unknown one": (
        "[qos.x]\ntier = 1\npreempts = ['low']",
        3,
        "low, which does not exist",
    ),
    "a QOS that preempts itself": ("[qos.x]\npreempts = ['x']", 2, "QOS x would preempt itself"),
    "a QOS that preempts its equal": (
        "[qos.low]\n[qos.x]\npreempts = ['low']",
        3,
        "QOS x of tier 0 may preempt low of tier 0, which is not lower",
    ),
    "a queue for an unknown account": (
        "[account.physics]\n[queue.default]\naccounts = ['physic']",
        3,
        "queue default is for account physic, which does not exist",
    ),
    "a longer default limit than the default queue's": (
        "[default]\ntime_limit_s = 100\n[queue.default]\nmax_time_s = 50",
        4,
        "max_time_s of queue default, the default queue, is 50, but default.time_limit_s is 100",
    ),
    "a default limit of a queue that it does not allow": (
        "[queue.default]\ndefault_time_s = 100\nmax_time_s = 50",
        2,
        "default_time_s of queue default is 100, but max_time_s is 50",
    ),
    "a default limit of a queue that the one above does not allow": (
        "[queue.default]\n[queue.lab]\nmax_time_s = 50\n[queue.nlp]\nparent = 'lab'\ndefault_time_s = 100",
        6,
        "default_time_s of queue nlp is 100, but max_time_s of queue lab above it is 50",
    ),
    "a queue that bursts and is handed over as a whole": (
        "[queue.default]\nburst_after_s = 60\nengine = 'slurm'",
        2,
        'queue default has burst_after_s, and engine = "slurm" decides where all its jobs run',
    ),
    "a queue that bursts to nowhere": (
        "[queue.default]\nburst_after_s = 60",
        2,
        "queue default has burst_after_s, and there is no Slurm to burst to",
    ),
    "a queue that allows what it never does": (
        "[queue.default]\nburst = 'allow'",
        2,
        'queue default has burst = "allow", and its jobs do not burst without burst_after_s',
    ),
}


@pytest.mark.parametrize(
    "text",
    [
        "[queue.default]\nburst_after_s = 60\nburst = 'ask'",
        "[queue.default]\nparent = 'lab'\nburst_after_s = 60\n[queue.lab]\nburst = 'allow'",
        "[queue.default]\nparent = 'lab'\nburst = 'allow'\n[queue.lab]\nburst_after_s = 60",
    ],
    ids=["one queue", "allowed above", "limited above"],
)
def test_a_queue_may_burst_by_its_own_words_and_those_above(tmp_path: Path, text: str) -> None:
    assert not problems(tmp_path, f"[handover]\ncommands = '/usr/bin'\n{text}\n")


@pytest.mark.parametrize(("text", "line", "words"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_contradictions_are_refused_with_file_and_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    problem = only(tmp_path, text + "\n")
    assert problem.message.startswith(f"file {tmp_path}/config.toml, line {line}: ")
    assert words in problem.message


def test_the_intended_word_is_suggested(tmp_path: Path) -> None:
    assert only(tmp_path, "[queue.default]\n[queue.v]\nparent = 'defualt'").hint == "did you mean default?"
    assert only(tmp_path, "[queue.default]\nwieght = 2").hint == "did you mean weight?"
    assert only(tmp_path, "[default]\nqos = 'norml'\n[qos.normal]").hint == "did you mean normal?"


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    text = "[gpu]\nids = 'x'\nzebra = 1\n[queue.default]\nweight = -1\n[queue.b]\nfactor = 7\n"
    found = [problem.message.partition(", ")[2] for problem in problems(tmp_path, text)]
    assert [one.partition(":")[0] for one in found] == ["line 2", "line 3", "line 5", "line 7"]
    with pytest.raises(UsageError, match=r"line 2: gpu.ids .* \(and 3 more; see all with: gpusched config check\)"):
        load_settings(f"{tmp_path}/config.toml", {})


def test_a_valid_file_has_no_problems(tmp_path: Path) -> None:
    assert problems(tmp_path, LAB) == []
    assert problems_in(None, {}) == []


def test_contradictions_are_reported_beside_invalid_values(tmp_path: Path) -> None:
    text = "[gpu]\nids = 'x'\n[queue.default]\nguaranteed_gpus = 4\nmax_gpus = 2\n[queue.a]\nweight = -1\n"
    found = [problem.message.partition(", ")[2] for problem in problems(tmp_path, text)]
    assert [one.partition(" is ")[0] for one in found] == [
        "line 2: gpu.ids",
        "line 4: queue default",
        "line 7: queue.a.weight",
    ]


FOLLOWING = {
    "the tier is missing": "[qos.low]\ntier = -1\n[qos.x]\ntier = 'high'\npreempts = ['low']",
    "the tier of the other is missing": "[qos.low]\ntier = 'none'\n[qos.x]\npreempts = ['low']",
    "the maximum is missing": "[queue.default]\nguaranteed_gpus = 4\nmax_gpus = '8'",
    "the name of the default queue is no text": "[default]\nqueue = 3\n[queue.batch]",
    "the section of the queues is misspelt": "[default]\nqueue = 'a'\n[queues.a]\n",
    "the name of a queue is no word": "[default]\nqueue = 'a b'\n[queue.b]",
    "the name of the parent is no word": "[queue.'a b']\n[queue.default]\nparent = 'ab'",
}


@pytest.mark.parametrize("text", FOLLOWING.values(), ids=FOLLOWING)
def test_a_mistake_is_reported_once_without_its_consequences(tmp_path: Path, text: str) -> None:
    only(tmp_path, text)


def test_an_unknown_key_is_reported_with_the_known_ones(tmp_path: Path) -> None:
    assert only(tmp_path, "[plugins]\nlaod = []").hint == "did you mean plugins.load?"
    assert only(tmp_path, "[plugins]\nzzz = []").hint == "[plugins] has: load"
    assert only(tmp_path, "[qos.x]\nzzz = 1").hint.startswith("[qos.NAME] has: tier, factor, preempts")
    assert only(tmp_path, "[qeue.x]\nweight = 1").hint == "did you mean queue?"


def test_a_setting_of_one_queue_belongs_to_its_table(tmp_path: Path) -> None:
    assert only(tmp_path, "[queue]\nweight = 2").message.endswith(
        "line 2: weight is a setting of one queue; write it below [queue.NAME]"
    )


def test_the_error_lists_all_problems(tmp_path: Path) -> None:
    for text, count in (("[gpu]\nids = 1\nid = 2", 2), ("[gpu", 1), ("[queue.a]\nparent = 'b'", 2)):
        with pytest.raises(SettingsError) as caught:
            load_settings(written(tmp_path, text), {})
        found = [problem.message for problem in caught.value.problems]
        assert found == [problem.message for problem in problems(tmp_path, text)]
        assert len(found) == count
