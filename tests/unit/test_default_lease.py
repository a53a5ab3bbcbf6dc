"""A forgotten shell does not hold a card for ever, also where nobody has set anything."""

from __future__ import annotations

import pytest

from gpusched.api.interactive import read_interactive
from gpusched.errors import UsageError
from gpusched.model.job import RetryRule
from gpusched.model.settings import InteractiveSettings, Settings
from gpusched.testing import request

HALF_A_DAY = 12 * 3600
NEVER = Settings(interactive=InteractiveSettings(lease_s=0))


@pytest.mark.parametrize(
    ("gpus", "values", "settings", "lease_s"),
    [
        pytest.param(1, {}, Settings(), HALF_A_DAY, id="with a GPU by default"),
        pytest.param(0, {}, Settings(), None, id="without a GPU none"),
        pytest.param(1, {"lease_s": 60}, Settings(), 60, id="as asked for"),
        pytest.param(0, {"lease_s": 60}, Settings(), 60, id="as asked for without a GPU"),
        pytest.param(1, {"lease_s": 0}, Settings(), None, id="none when none is asked for"),
        pytest.param(1, {}, NEVER, None, id="none when the settings say so"),
    ],
)
def test_the_default_lease_applies(gpus: int, values: dict[str, int], settings: Settings, lease_s: int | None) -> None:
    found, _ = read_interactive({"interactive": "pty", **values}, request(gpus=gpus), RetryRule(), settings)
    assert found is not None
    assert found.lease_s == lease_s


def test_a_lease_applies_to_foreground_jobs_only() -> None:
    with pytest.raises(UsageError, match="lease_s is only for a job in the foreground"):
        read_interactive({"lease_s": 60}, request(gpus=1), RetryRule(), Settings())
