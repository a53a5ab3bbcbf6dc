"""Tables are made by the migrations here, not copied, see `ready_table`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ready_table import use_migrations, use_ready_tables


@pytest.fixture(autouse=True)
def _with_migrations() -> Iterator[None]:
    use_migrations()
    yield
    use_ready_tables()
