"""Folders of the package are no larger than the table of docs/contributing.md allows."""

from __future__ import annotations

import pytest

from tools.sizes import ALL, CORE, limits, sizes

SIZES, LIMITS = sizes(), limits()


@pytest.mark.parametrize("row", sorted(SIZES))
def test_a_folder_is_no_larger_than_its_row_allows(row: str) -> None:
    """Say it once, or leave something out; raise the number only with a sentence in the row that says what for."""
    assert SIZES[row] <= LIMITS[row]


def test_the_table_has_each_folder_and_no_other() -> None:
    assert set(LIMITS) == set(SIZES)


def test_rows_of_the_table_add_up() -> None:
    """A total allows no more than its folders do: what one gives up is not left to the others."""
    folders = {row: most for row, most in LIMITS.items() if row not in (CORE, ALL)}
    assert LIMITS[ALL] <= sum(folders.values()) + len(folders)
    assert LIMITS[CORE] <= sum(most for row, most in folders.items() if "addons" not in row) + len(folders)
    assert SIZES[ALL] == sum(count for row, count in SIZES.items() if row not in (CORE, ALL))
