"""A site's plug-ins: what they may say, and that none of them can stop anything."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from gpusched.errors import UsageError
from gpusched.model.job import Request
from gpusched.model.settings import Settings
from gpusched.model.states import JobState
from gpusched.plugins import FAILURES_ALLOWED, Plugins, hookimpl
from gpusched.scheduler.planner import decide
from gpusched.scheduler.priority import class_key
from gpusched.testing import job, node, snapshot

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "plugins.md"


def loaded(**functions):
    """Plug-ins of one module with these functions."""
    plugins = Plugins()
    plugins.register(SimpleNamespace(**{name: hookimpl(function) for name, function in functions.items()}), "site")
    return plugins


def plan(plugins, *waiting, nodes=None):
    return decide(snapshot(*(nodes or [node(gpus=2)]), waiting=waiting), Settings(), plugins.extensions())


def nodes_of(decided):
    return [start.placement.node for start in decided.starts]


def test_without_plugins_there_are_no_extensions():
    extensions = Plugins.load().extensions()
    assert (extensions.sorts, extensions.filters, extensions.scores, extensions.permits) == ((), (), (), ())


def test_points_of_a_plugin_put_a_job_first_and_are_a_part_of_its_priority():
    plugins = loaded(gpusched_queue_sort=lambda key: 1e6 if key.user == "bob" else None)
    one = [node(gpus=1)]
    waiting = [job(1, request=Request(gpus=1)), job(2, request=Request(gpus=1), user="bob", uid=2)]
    assert [start.job_id for start in plan(plugins, *waiting, nodes=one).starts] == [2]
    assert plugins.extensions().queue_sort(class_key(waiting[1])) == (("site", 1e6),)


def test_a_filter_excludes_a_job_from_a_node():
    plugins = loaded(gpusched_filter=lambda node: "is for the course" if node.name == "n1" else None)
    nodes = [node("n1", gpus=1), node("n2", gpus=1)]
    assert [start.placement.node for start in plan(plugins, job(1, request=Request(gpus=1)), nodes=nodes).starts] == [
        "n2"
    ]
    decided = plan(plugins, job(1, request=Request(gpus=1)), nodes=nodes[:1])
    assert decided.starts == ()
    assert [(str(one.code), one.text) for one in decided.reasons.values()] == [("Plugin", "site: is for the course")]


def test_a_score_chooses_among_nodes():
    plugins = loaded(gpusched_score=lambda node: float(node.name == "n2"))
    nodes = [node("n1", gpus=1), node("n2", gpus=1)]
    assert [start.placement.node for start in plan(plugins, job(1, request=Request(gpus=1)), nodes=nodes).starts] == [
        "n2"
    ]


def test_a_job_without_permit_waits_with_the_plugins_sentence_and_others_pass():
    plugins = loaded(gpusched_permit=lambda key: "ask first" if key.user == "ann" else None)
    decided = plan(plugins, job(1, request=Request(gpus=1)), job(2, request=Request(gpus=1), user="bob", uid=2))
    assert [start.job_id for start in decided.starts] == [2]
    ((key, reason),) = decided.reasons.items()
    assert (key.user, str(reason.code), reason.text) == ("ann", "Plugin", "site: ask first")


def _raises(key):
    raise RuntimeError("no such table")


def _exits(key):
    sys.exit(3)


BROKEN = {
    "one that raises": (_raises, "RuntimeError: no such table"),
    "one that exits": (_exits, "SystemExit: 3"),
    "one that answers nonsense": (lambda key: "many", "answered 'many', which is not a number"),
    "one that answers with no number at all": (lambda key: float("nan"), "which is not a number"),
    "one that answers true": (lambda key: True, "answered True, which is not a number"),
}


@pytest.mark.parametrize(("function", "text"), BROKEN.values(), ids=BROKEN)
def test_a_broken_plugin_is_reported_and_skipped(function, text):
    plugins = loaded(gpusched_queue_sort=function)
    assert [start.job_id for start in plan(plugins, job(1, request=Request(gpus=1))).starts] == [1]
    assert "plug-in site: gpusched_queue_sort failed" in plugins.troubles[0]
    assert text in plugins.troubles[0]


def test_a_plugin_with_repeated_failures_is_disabled():
    calls = []

    def fails(key):
        calls.append(key)
        raise ValueError("again")

    plugins = loaded(gpusched_queue_sort=fails)
    for _ in range(FAILURES_ALLOWED + 4):
        plan(plugins, job(1, request=Request(gpus=1)))
    assert len(calls) == FAILURES_ALLOWED
    assert plugins.troubles[-1].endswith("it is left out from now on")


def test_a_failing_filter_excludes_nothing():
    plugins = loaded(gpusched_filter=_raises)
    assert plan(plugins, job(1, request=Request(gpus=1))).starts


def test_state_changes_are_delivered_and_a_failing_hook_does_no_harm():
    seen = []
    plugins = loaded(gpusched_job_changed=lambda before, after: seen.append((before, after.state)))
    plugins.job_changed(None, job(1, state=JobState.PENDING))
    assert seen == [(None, JobState.PENDING)]
    loaded(gpusched_job_changed=lambda after: 1 / 0).job_changed(None, job(1))


def test_a_module_that_cannot_be_imported_is_refused_with_its_name():
    with pytest.raises(UsageError, match=r"'no_such_rules' of \[plugins\] load cannot be loaded: ModuleNotFoundError"):
        Plugins.load(["no_such_rules"])


def test_an_unknown_hook_is_refused(monkeypatch):
    module = ModuleType("odd_rules")
    module.gpusched_filtre = hookimpl(lambda key: None)
    monkeypatch.setitem(sys.modules, "odd_rules", module)
    with pytest.raises(UsageError, match="hook that does not exist") as caught:
        Plugins.load(["odd_rules"])
    assert "gpusched_filter" in caught.value.hint


def test_the_documented_example_works(monkeypatch, capsys):
    source = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.S)[1]
    module = ModuleType("lab_rules")
    exec(compile(source, str(PAGE), "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "lab_rules", module)
    plugins = Plugins.load(["lab_rules"])
    assert plugins.names == ("lab_rules",)
    nodes = [node("course", gpus=4), node("n2", gpus=4, labels=("imagenet",))]
    waiting = [
        job(1, request=Request(gpus=2), time_limit_s=60),
        job(2, request=Request(gpus=1), account="vision", time_limit_s=60),
        job(3, request=Request(gpus=1), time_limit_s=5 * 86400),
    ]
    decided = plan(plugins, *waiting, nodes=nodes)
    assert {start.job_id: start.placement.node for start in decided.starts} == {1: "n2", 2: "n2"}
    assert [reason.text for reason in decided.reasons.values()] == [
        "lab_rules: jobs of more than two days need the admin's approval"
    ]
    plugins.job_changed(waiting[0], job(1, state=JobState.COMPLETED, end_at=1.0))
    assert capsys.readouterr().out == "job 1 of ann: COMPLETED\n"
    assert plugins.troubles == []


def test_a_filter_against_one_users_jobs_does_not_block_equal_jobs_of_others():
    plugins = loaded(gpusched_filter=lambda key: "not for ann" if key.user == "ann" else None)
    waiting = [job(1, request=Request(gpus=1)), job(2, request=Request(gpus=1), user="bob", uid=2)]
    assert [start.job_id for start in plan(plugins, *waiting).starts] == [2]
