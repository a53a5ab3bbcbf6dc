"""Layouts set by command, through the real source over a fake library and into a scheduler, with jobs waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from accidents import AccidentLab
from fake_nvml import A100
from lab import ANN, ROOT
from memory import check_memory

from gpusched.errors import Forbidden, NotFound, Refused, UsageError
from gpusched.gpu import mig_layout
from gpusched.model.commands import SetMigLayout
from gpusched.model.mentions import render
from gpusched.model.mig import MigOrder
from gpusched.model.states import JobState
from gpusched.ports.tables import MIG_LAYOUTS
from gpusched.testing import request

MakeLab = Callable[..., AccidentLab]


@pytest.fixture
def lab(accidents: MakeLab, monkeypatch: pytest.MonkeyPatch) -> AccidentLab:
    monkeypatch.setattr(mig_layout.os, "geteuid", lambda: 0)
    found = accidents(gpus=2)
    for device in found.devices:
        device.kinds = A100
    poll(found)
    return found


def poll(lab: AccidentLab, polls: int = 1) -> list[MigOrder]:
    """What the loop does between ticks: orders go out with the request for a reading. Returns the last ones."""
    orders: tuple[MigOrder, ...] = ()
    for _ in range(polls):
        orders = lab.ticker.mig_orders("n1")
        assert lab.source is not None
        lab.source.carry_out(orders, lambda: True)
        lab.tick(1)
        check_memory(lab)
    return list(orders)


def set_layout(lab: AccidentLab, layout: str | None, target: str = "0", caller: Any = ROOT, **parts: Any) -> Any:
    (answer,) = lab.ask(SetMigLayout(caller, target, layout, **parts))
    if isinstance(answer, Exception):
        raise answer
    return answer


def layouts(lab: AccidentLab) -> list[list[str]]:
    return [[str(one.name).rpartition(" ")[2] for one in device.instances if one] for device in lab.devices]


def test_an_idle_card_is_divided_and_a_job_gets_a_part(lab: AccidentLab) -> None:
    plan = set_layout(lab, "3g.40gb,2x2g.20gb")
    assert (plan["before"], plan["after"], plan["waits_for"]) == ("off", "3g.40gb,2x2g.20gb", [])
    job_id = lab.submit(request=request(gpus=1, gpu_type="3g.40gb"))
    assert lab.job(job_id).state is JobState.PENDING
    poll(lab, 3)
    assert layouts(lab) == [["3g.40gb", "2g.20gb", "2g.20gb"], []]
    assert lab.job(job_id).state is JobState.RUNNING
    (record,) = lab.store.load(MIG_LAYOUTS).values()
    assert (str(record.made), record.wanted, record.failure) == ("3g.40gb,2x2g.20gb", None, None)
    assert poll(lab) == []


def test_a_busy_card_takes_no_more_jobs_and_changes_when_they_have_ended(lab: AccidentLab) -> None:
    first = lab.submit(request=request(gpus=1))
    where = lab.scheduler.state.open_runs[f"{first}.1"].gpus[0].index
    plan = set_layout(lab, "7x1g.10gb", str(where))
    assert plan["waits_for"] == [{"job": str(first), "user": "ann"}]
    other = lab.submit(request=request(gpus=1))
    waiting = lab.submit(request=request(gpus=1, gpu_type="1g.10gb"))
    poll(lab, 3)
    assert lab.scheduler.state.open_runs[f"{other}.1"].gpus[0].index == 1 - where
    assert lab.job(waiting).state is JobState.PENDING
    assert layouts(lab) == [[], []]
    why = lab.scheduler.answers.reason_for(lab.job(waiting))
    assert why is not None
    assert f"GPU {where} of node n1: drained: its MIG layout changes to 7x1g.10gb" in why.text
    poll(lab, 12)
    assert len(layouts(lab)[where]) == 7
    assert lab.job(waiting).run == 1


def test_a_foreign_process_refuses_and_later_delays_the_change(lab: AccidentLab) -> None:
    lab.strangers = {0: 4000}
    lab.tick(1)
    with pytest.raises(Refused, match=r"GPU n1:0 is used by process 1 of eva \(python\), without a job"):
        set_layout(lab, "3g.40gb")
    lab.strangers = {}
    lab.tick(1)
    set_layout(lab, "3g.40gb")
    lab.strangers = {0: 4000}
    lab.tick(1)
    assert poll(lab, 3) == []
    assert layouts(lab) == [[], []]
    lab.strangers = {}
    poll(lab, 2)
    assert layouts(lab)[0] == ["3g.40gb"]


@pytest.mark.parametrize(
    ("target", "layout", "words"),
    [
        ("0", "9g.90gb", "the card has no profile 9g.90gb"),
        ("0", "what", "'what' is not a MIG profile"),
        ("n1", "off", "'n1' is a node, not a GPU"),
        ("1:0", "off", "n1:1:0 is a MIG instance, not a card"),
        ("9", "off", "'9' is neither a node nor a GPU here"),
    ],
)
def test_what_is_no_layout_or_no_card_is_refused(lab: AccidentLab, target: str, layout: str, words: str) -> None:
    set_layout(lab, "on")
    set_layout(lab, "3g.40gb", "1")
    poll(lab, 3)
    with pytest.raises((UsageError, NotFound), match=words):
        set_layout(lab, layout, target)


def test_others_than_admins_and_cards_without_mig_are_refused(lab: AccidentLab) -> None:
    with pytest.raises(Forbidden, match="only an admin may change MIG layouts"):
        set_layout(lab, "3g.40gb", caller=ANN)
    lab.devices[0].codes = {}
    lab.nvml.codes = {"nvmlDeviceGetMigMode": 3}
    lab.tick(31)
    with pytest.raises(Refused, match="cannot do MIG"):
        set_layout(lab, "3g.40gb")


def test_a_change_that_fails_is_told_and_the_card_takes_jobs_again(lab: AccidentLab) -> None:
    told: list[Any] = []
    lab.scheduler.signals.machine_set.connect(told.append)
    set_layout(lab, "3g.40gb")
    lab.nvml.codes = {"nvmlDeviceCreateGpuInstanceWithPlacement": 999}
    poll(lab, 2)
    (record,) = lab.store.load(MIG_LAYOUTS).values()
    assert (record.wanted, record.made) == (None, None)
    assert (record.failure or "").endswith("the layout from before, off, is back")
    assert [one.after for one in told] == ["3g.40gb", None]
    assert "was not changed" in told[1].what
    assert poll(lab) == []
    job_id = lab.submit(request=request(gpus=2))
    poll(lab, 2)
    assert lab.job(job_id).run == 1


def test_a_restart_goes_on_and_a_reboot_makes_the_layout_again(lab: AccidentLab) -> None:
    set_layout(lab, "3g.40gb")
    lab.restart()  # killed before an order went out
    poll(lab, 2)
    assert layouts(lab)[0] == ["3g.40gb"]
    lab.restart()
    assert poll(lab, 2) == []
    for instance in lab.devices[0].instances:
        assert instance is not None
        instance.gone = True
    lab.devices[0].instances, lab.devices[0].mig = [], False
    lab.restart()
    poll(lab, 3)
    assert layouts(lab)[0] == ["3g.40gb"]
    set_layout(lab, None)
    lab.devices[0].instances, lab.devices[0].mig = [], False
    lab.restart()
    poll(lab, 3)
    assert layouts(lab)[0] == []


def test_a_change_can_be_replaced_but_not_forgotten_while_it_waits(lab: AccidentLab) -> None:
    job_id = lab.submit(request=request(gpus=2))
    set_layout(lab, "3g.40gb")
    assert set_layout(lab, "3g.40gb")["is_changed"] is False
    with pytest.raises(Refused, match="is about to get the layout 3g.40gb"):
        set_layout(lab, None)
    assert set_layout(lab, "off")["is_changed"]
    # Called off while jobs are on the card: it takes jobs again at once, without waiting for their end.
    assert next(iter(lab.store.load(MIG_LAYOUTS).values())).wanted is None
    assert poll(lab) == []
    poll(lab, 15)
    assert lab.job(job_id).state is JobState.COMPLETED
    assert layouts(lab) == [[], []]
    (record,) = lab.store.load(MIG_LAYOUTS).values()
    assert str(record.made) == "off"


def test_a_change_of_an_idle_card_is_called_off_by_the_outcome_of_its_order(lab: AccidentLab) -> None:
    set_layout(lab, "3g.40gb")
    (order,) = lab.ticker.mig_orders("n1")
    assert set_layout(lab, "off")["is_changed"]
    assert next(iter(lab.store.load(MIG_LAYOUTS).values())).wanted is not None
    assert lab.source is not None
    # The first order may be under way: the card stays closed until the second one has the outcome.
    lab.source.carry_out([order], lambda: True)
    lab.tick(1)
    assert layouts(lab)[0] == ["3g.40gb"]
    assert next(iter(lab.store.load(MIG_LAYOUTS).values())).wanted is not None
    poll(lab, 2)
    assert layouts(lab)[0] == []


def test_a_dry_run_changes_nothing_and_says_whom_it_strands(lab: AccidentLab) -> None:
    set_layout(lab, "2x3g.40gb", "0")
    poll(lab, 3)
    jobs = [lab.submit(request=request(gpus=1, gpu_type="3g.40gb")) for _ in range(3)]
    plan = set_layout(lab, "7x1g.10gb", dry_run=True)
    assert {one["job"] for one in plan["waits_for"]} == {str(job_id) for job_id in jobs[:2]}
    assert list(map(render, plan["notes"])) == [
        f"job {jobs[2]} asked for 3g.40gb, which no GPU will have: they will not start"
    ]
    assert next(iter(lab.store.load(MIG_LAYOUTS).values())).wanted is None


def test_a_profile_that_no_card_has_is_refused_with_a_layout_that_has_it(lab: AccidentLab) -> None:
    set_layout(lab, "2x3g.40gb")
    poll(lab, 3)
    with pytest.raises(Refused) as error:
        lab.submit(request=request(gpus=1, gpu_type="4g.40gb"))
    assert error.value.message == "asked for a MIG instance 4g.40gb; no GPU is divided so now, but GPU n1:0 could be"
    assert "gctl mig set n1:0 4g.40gb,3g.40gb" in (error.value.hint or "")


def test_a_card_that_was_taken_out_can_be_forgotten(lab: AccidentLab) -> None:
    set_layout(lab, "3g.40gb", "1")
    del lab.devices[1]
    lab.restart()
    assert poll(lab, 2) == []
    assert lab.scheduler.has_work
    assert set_layout(lab, None, "GPU-1")["gpu"] == "n1:1"
    assert not lab.scheduler.has_work
    assert lab.store.load(MIG_LAYOUTS) == {}


def test_a_layout_that_is_made_again_is_in_the_record(lab: AccidentLab) -> None:
    set_layout(lab, "3g.40gb")
    poll(lab, 2)
    lab.devices[0].instances, lab.devices[0].mig = [], False
    lab.restart()
    told: list[Any] = []
    lab.scheduler.signals.machine_set.connect(told.append)
    poll(lab, 1)
    assert [(one.what, one.before, one.after) for one in told] == [
        ("GPU n1:0 has lost its MIG layout 3g.40gb: making it again", "off", "3g.40gb")
    ]
