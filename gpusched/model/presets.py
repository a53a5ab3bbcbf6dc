"""Presets of [priority]: named sets of defaults for its other settings.

    fair         no user gets much more than an equal share, whatever their jobs; the default
    throughput   longest wait relative to length first, regardless of user: short mean completion
    fifo         first come, first served, with EASY backfill
    slurm        multifactor priorities as on a typical Slurm site, with backfill by time limits
    auto         the best of these four in a replay of the last weeks

Settings in the config file override the preset. `fair` equals the defaults of `model.planner_settings`; the other
presets name every setting that determines their order and backfill, so that changes of those defaults do not
affect them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gpusched.model.planner_settings import AUTO, PRESET_NAMES, PrioritySettings
from gpusched.model.settings import Settings
from gpusched.model.value import replace

FAIR, THROUGHPUT, FIFO, SLURM = CHOICES = tuple(name for name in PRESET_NAMES if name != AUTO)

_DAY_S = 86400.0

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        FAIR: {},
        # Users do not matter. A strict order by length (spf) with its permanent reservation costs
        # more than it gains: mean completion of lublin_256 without estimates is 8 times greedy's, here 1.4 times.
        THROUGHPUT: {
            "order": "response_ratio",
            "fairshare_step": 1.0,
            "reserve_after_s": 6 * 3600.0,
            "reserve_after_runs": 10.0,
            "fence_s": 2 * _DAY_S,
            "max_wait_s": 7 * _DAY_S,
            "backfill": True,
            "backfill_depth": 1,
            "backfill_elsewhere": True,
            "backfill_by": "prediction",
            "backfill_order": "line",
            "predict": True,
        },
        FIFO: {
            "order": "fifo",
            "fence_s": 2 * _DAY_S,
            "backfill": True,
            "backfill_depth": 1,
            "backfill_elsewhere": True,
            "backfill_by": "prediction",
            "backfill_order": "line",
            "predict": True,
        },
        # PriorityWeightAge=1000, Fairshare=10000, JobSize=1000, Partition=1000, QOS=10000, PriorityMaxAge=7-0,
        # PriorityDecayHalfLife=7-0, as in https://slurm.schedmd.com/priority_multifactor.html and its examples.
        SLURM: {
            "order": "multifactor",
            "fence_s": 2 * _DAY_S,
            "weight_age": 1000.0,
            "max_age_s": 7 * _DAY_S,
            "weight_nice": 20000.0,
            "weight_fairshare": 10000.0,
            "half_life_s": 7 * _DAY_S,
            "weight_size": 1000.0,
            "favor_small": False,
            "weight_queue": 1000.0,
            "weight_qos": 10000.0,
            "weight_deadline": 0.0,
            "weight_fit": 0.0,
            "weight_short": 0.0,
            "weight_whole": 0.0,
            "backfill": True,
            "backfill_depth": 1,
            "backfill_elsewhere": True,
            "backfill_by": "limit",
            "backfill_order": "line",
            "predict": False,
        },
    }
)
"""Settings of each preset, by setting name."""


def preset(name: str, stated: Mapping[str, Any] = MappingProxyType({})) -> PrioritySettings:
    """Build [priority] from a preset and the settings stated in the config file. `auto` starts as `fair`."""
    return PrioritySettings(**{"preset": name, **PRESETS[FAIR if name == AUTO else name], **stated})


def under_preset(settings: Settings, name: str) -> Settings:
    """Replace the preset of these settings by another of the four; settings stated in the config file stay.

    The result keeps the configured name of the preset, which may be `auto`.
    """
    stated = {key: getattr(settings.priority, key) for key in settings.stated}
    priority = replace(preset(name, stated), preset=settings.priority.preset)
    return replace(settings, priority=priority)
