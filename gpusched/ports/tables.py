"""The small tables beside jobs and runs: one declaration each, from which all that reads and writes them is derived.

To add one, declare it here, add it to `TABLES`, and create it in a migration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from gpusched.model.alerts import Alert
from gpusched.model.batch import Batch
from gpusched.model.cluster import Clearance, DrainEntry, Drainer
from gpusched.model.mig import CardLayout
from gpusched.model.pipeline import Pipeline
from gpusched.model.snapshot import CalendarEntry, Estimate, Placement, Usage
from gpusched.model.step import JobStep
from gpusched.model.table_settings import KINDS, Key, TableSetting

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, eq=False, slots=True)
class Table(Generic[K, V]):
    """One value for each key."""

    name: str
    """In the database."""
    key: tuple[str, ...]
    """Its key columns; a key of several is a tuple."""
    value: type[Any] | Mapping[str, type[Any]]
    """Type of a value; where that depends on the key, by its first word."""
    column: str | None = None
    """The column with the value; None: one for each of its fields, under the name of the field."""
    is_added_only: bool = False
    """Rows never change."""
    only: str = ""
    """Condition on the rows that are loaded, in SQL; empty: all."""
    order: str = ""
    """Order in which they are loaded, in SQL; empty: by key."""


DRAINS: Table[str, DrainEntry] = Table("drains", ("target",), DrainEntry)
"""Drained nodes and GPUs, by name or UUID."""
DRAINERS: Table[str, Drainer] = Table("drainers", ("target",), Drainer)
"""Who drained them; no row for what the daemon drained itself."""
MIG_LAYOUTS: Table[str, CardLayout] = Table("mig_layouts", ("uuid",), CardLayout, "document")
"""MIG layouts that were set for cards by command, by UUID."""
CLEARANCES: Table[str, Clearance] = Table("gpu_clearances", ("uuid",), Clearance)
"""The latest confirmation that a GPU is well, by UUID."""
FENCES: Table[int, float] = Table("fences", ("job_id",), float, "fence_at")
"""From when on nothing overtakes a pending job that has had a reservation, by job or task."""
KEPT_PLACES: Table[int, Placement] = Table("kept_places", ("job_id",), Placement, "place")
"""Resources that stay reserved for a pending job past its fence."""
USAGE: Table[tuple[str, str], Usage] = Table("usage", ("account", "user"), Usage)
"""Decayed usage of ended runs."""
CALENDAR: Table[str, CalendarEntry] = Table("reservations", ("name",), CalendarEntry)
TABLE_SETTINGS: Table[Key, TableSetting] = Table("table_settings", ("kind", "name"), KINDS, "document")
"""Dated limits, credits and the like."""
ESTIMATES: Table[int, Estimate] = Table("estimates", ("job_id",), Estimate, order="job_id DESC")
PIPELINES: Table[int, Pipeline] = Table("pipelines", ("number",), Pipeline, is_added_only=True)
BATCHES: Table[int, Batch] = Table("batches", ("first_id",), Batch, only="made < jobs")
"""Batches whose jobs are not all made, and those that have a key."""
ALERTS: Table[str, Alert] = Table("alerts", ("key",), Alert, order="at, key")
"""Alerts to send."""
STEPS: Table[tuple[int, int, int], JobStep] = Table(
    "steps", ("job_id", "run", "number"), JobStep, only="end_at IS NULL"
)
"""By job, run and number; the end of one is final."""

TABLES: tuple[Table[Any, Any], ...] = (
    *(DRAINS, DRAINERS, MIG_LAYOUTS, CLEARANCES, FENCES, KEPT_PLACES, USAGE, CALENDAR, TABLE_SETTINGS),
    *(ESTIMATES, PIPELINES, BATCHES, ALERTS, STEPS),
)

WHOLE = TABLES[: TABLES.index(ESTIMATES)]
"""Those that the daemon has in memory as they are."""


class Rows(dict[Table[Any, Any], dict[Any, Any]]):
    """Values of several tables by their keys; a table that is not in it yet has none."""

    if TYPE_CHECKING:

        def __getitem__(self, table: Table[K, V]) -> dict[K, V]: ...

    def __missing__(self, table: Table[Any, Any]) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        self[table] = made
        return made

    def put(self, table: Table[K, V], key: K, value: V | None) -> None:
        """Set a value; None removes it."""
        if value is None:
            self[table].pop(key, None)
        else:
            self[table][key] = value


class ChangedRows(Rows):
    """The same with changed values alone; None where one is deleted."""

    if TYPE_CHECKING:

        def __getitem__(self, table: Table[K, V]) -> dict[K, V | None]: ...  # type: ignore[override]
