"""How the small tables of `ports.tables` are stored: statements and rows, derived from their declarations."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from gpusched.model.snapshot import Usage
from gpusched.model.value import decode
from gpusched.ports.tables import TABLES, Table
from gpusched.store.rows import Columns, Row, UsageColumns, coding, pack, pack_text, unpack_text

K = TypeVar("K")
V = TypeVar("V")


def insert(table: str, columns: Sequence[str]) -> str:
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' for _ in columns)})"


def upsert(table: str, columns: Sequence[str], key: Sequence[str]) -> str:
    changes = ", ".join(f"{name} = excluded.{name}" for name in columns if name not in key)
    return f"{insert(table, columns)} ON CONFLICT ({', '.join(key)}) DO UPDATE SET {changes}"


class StoredTable(Generic[K, V]):
    """Statements of a table, and conversion of its rows."""

    def __init__(self, table: Table[K, V]) -> None:
        key, self._of_key = table.key, len(table.key)
        names, self._into, self._out = _coding(table)
        own = [name for name in key if name not in names]
        self._own = len(own)
        self.columns = (*own, *names)
        is_key = " AND ".join(f"{name} = ?" for name in key)
        self._put = insert(table.name, self.columns) if table.is_added_only else upsert(table.name, self.columns, key)
        self._drop = f"DELETE FROM {table.name} WHERE {is_key}"
        self.select = f"SELECT {', '.join(self.columns)} FROM {table.name}"
        self.find = f"{self.select} WHERE {is_key}"
        where = f" WHERE {table.only}" if table.only else ""
        self.load = f"{self.select}{where} ORDER BY {table.order or ', '.join(key)}"

    def write(self, db: sqlite3.Connection, changed: Mapping[K, V | None]) -> None:
        """Write each row with a value; delete by key each without one."""
        written = [self._row(key, value) for key, value in changed.items() if value is not None]
        if written:
            db.executemany(self._put, written)
        if len(written) < len(changed):
            db.executemany(self._drop, [self.key_row(key) for key, value in changed.items() if value is None])

    def key_row(self, key: K) -> list[Any]:
        parts: Any = (key,) if self._of_key == 1 else key
        return [pack_text(part) if isinstance(part, str) else part for part in parts]

    def read(self, row: Row) -> tuple[K, V]:
        """Decode the columns. Raises: KeyError, TypeError, ValueError for invalid ones."""
        parts = [unpack_text(part) if isinstance(part, str) else part for part in row[: self._of_key]]
        key: Any = parts[0] if self._of_key == 1 else tuple(parts)
        return key, self._out(key, row[self._own :])

    def _row(self, key: K, value: V) -> Row:
        row = self._into(value)
        return [*self.key_row(key), *row] if self._own else row


def _coding(table: Table[K, V]) -> tuple[Sequence[str], Callable[[V], Row], Callable[[Any, Row], V]]:
    """The columns of a value, and how it is encoded in them and, with its key, decoded."""
    kind = table.value
    if isinstance(kind, Mapping):
        return (str(table.column),), lambda value: [pack(value)], lambda key, row: decode(row[0], kind[key[0]])
    if table.column is not None:
        into, out = coding(kind) or (kind, kind)
        return (table.column,), lambda value: [into(value)], lambda _, row: out(row[0])
    columns: Any = UsageColumns() if kind is Usage else Columns(kind, first=table.key)
    return columns.names, columns.row, lambda _, row: columns.read(row)


STORED: Mapping[Table[Any, Any], StoredTable[Any, Any]] = {table: StoredTable(table) for table in TABLES}
