"""Each small table, from its declaration alone: what is put in is a change, has to be recorded, and is found again."""

from __future__ import annotations

from typing import Any

import pytest

from gpusched.daemon.commit import is_recorded, must_record
from gpusched.model.alerts import Alert
from gpusched.model.batch import Batch
from gpusched.model.cluster import Clearance, DrainCause, DrainEntry, Drainer
from gpusched.model.mig import CardLayout
from gpusched.model.pipeline import Pipeline
from gpusched.model.resources import Resources
from gpusched.model.snapshot import CalendarEntry, Estimate, Placement, Usage
from gpusched.model.states import JobState
from gpusched.model.step import JobStep
from gpusched.model.table_settings import Credit
from gpusched.model.value import replace
from gpusched.ports import Changes
from gpusched.ports.tables import (
    ALERTS,
    BATCHES,
    CALENDAR,
    CLEARANCES,
    DRAINERS,
    DRAINS,
    ESTIMATES,
    FENCES,
    KEPT_PLACES,
    MIG_LAYOUTS,
    PIPELINES,
    STEPS,
    TABLE_SETTINGS,
    TABLES,
    USAGE,
    Rows,
    Table,
)
from gpusched.store.sqlite import SqliteStore
from gpusched.testing import NOW, job, run, spec

ODD = 'he said "\udcff"'
EXAMPLES: dict[Table[Any, Any], tuple[Any, Any]] = {
    DRAINS: (ODD, DrainEntry(ODD, DrainCause.GPU_LOST)),
    DRAINERS: ("n1", Drainer(ODD, NOW, ODD)),
    MIG_LAYOUTS: ("GPU-1", CardLayout("GPU-1", "n1", 0, wanted=None, number=7, user=ODD, at=NOW)),
    CLEARANCES: ("GPU-1", Clearance("GPU-1", NOW, 3)),
    FENCES: (7, NOW + 0.5),
    KEPT_PLACES: (7, Placement("n1", (), 2.0, 64)),
    USAGE: (("vision", ODD), Usage("vision", ODD, Resources(1.5, 2, 3.0, 4), NOW)),
    CALENDAR: ("talk", CalendarEntry("talk", NOW, 3600, (Placement("n1", (), 2.0, 64),), made_by="ann", made_at=NOW)),
    TABLE_SETTINGS: (("credit", "1"), Credit(1, "vision", 10.0, NOW, "root")),
    ESTIMATES: (1, Estimate(1, NOW, NOW + 1, None)),
    PIPELINES: (3, Pipeline(3, 1000, "ann", ODD, NOW, "")),
    BATCHES: (1, Batch(1, 9, 1000, "ann", NOW, spec(), "0" * 64, "submitted", False)),
    ALERTS: ("1.1 end", Alert("1.1 end", "end", ("end",), 1000, NOW, job_id=1)),
    STEPS: ((1, 1, 0), JobStep(1, 1, 0, "train", "./train", "n1", NOW)),
}


def table_with_a_job() -> SqliteStore:
    store = SqliteStore.in_memory()
    made = job(1)
    store.commit(Changes({1: made}, {"1.1": run(made)}))
    return store


def one_row(table: Table[Any, Any], key: Any, value: Any) -> Changes:
    changes = Changes()
    changes.rows[table][key] = value
    return changes


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_a_row_is_a_change_that_is_recorded_and_found_again(table: Table[Any, Any]) -> None:
    store, (key, value) = table_with_a_job(), EXAMPLES[table]
    changes = one_row(table, key, value)
    assert changes
    assert must_record(changes)
    assert not is_recorded(changes, store)
    store.commit(changes)
    assert is_recorded(changes, store)
    assert store.load(table) == store.find(table, [key, key]) == {key: value}
    assert store.load(table, limit=0) == {}
    gone = one_row(table, key, None)
    assert gone
    assert must_record(gone)
    assert not is_recorded(gone, store)
    store.commit(gone)
    assert is_recorded(gone, store)
    assert store.load(table) == store.find(table, [key]) == {}


def test_rows_that_are_not_loaded_are_found() -> None:
    store = table_with_a_job()
    key, step = EXAMPLES[STEPS]
    first_id, batch = EXAMPLES[BATCHES]
    over = replace(step, state=JobState.COMPLETED, end_at=NOW)
    store.commit(one_row(STEPS, key, over))
    whole = one_row(BATCHES, first_id, replace(batch, made=9, key="k"))
    store.commit(whole)
    assert store.load(STEPS) == store.load(BATCHES) == {}
    assert store.find(STEPS, [key]) == {key: over}
    assert is_recorded(whole, store), "a batch that is made is in the table for its key"


def test_an_empty_table_of_changes_is_no_change() -> None:
    changes = Changes()
    assert changes.rows[DRAINS] == {}
    assert not changes
    assert not must_record(changes)


def test_a_value_of_none_removes_a_row() -> None:
    rows = Rows()
    rows.put(DRAINS, "n1", DrainEntry("fan"))
    rows.put(DRAINS, "n2", None)
    assert rows == {DRAINS: {"n1": DrainEntry("fan")}}
    rows.put(DRAINS, "n1", None)
    assert rows[DRAINS] == {}
