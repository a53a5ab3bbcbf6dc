"""Presets of [priority]: its other settings under one name, as defaults of their own.

    fair         no user gets much more than an equal share, whatever their jobs; the default
    throughput   those that have waited longest for their length, whoever they belong to: short mean completion
    fifo         first come, first served, with EASY backfill
    slurm        multifactor priorities as a Slurm site sets them, with backfill by time limits
    auto         one of these four, chosen by what they would have made of the last weeks

What the config file says of a setting wins over the preset. `fair` is what `model.settings` has as defaults; the other
presets name every setting that their order and backfill go by, so that they do not change when those defaults do.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gpusched.model.settings import AUTO, PRESET_NAMES, PrioritySettings, Settings
from gpusched.model.value import replace

FAIR, THROUGHPUT, FIFO, SLURM = CHOICES = tuple(name for name in PRESET_NAMES if name != AUTO)

_DAY_S = 86400.0

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        FAIR: {},
        # Whose job it is does not matter. A strict order by length (spf) with its reservation that always stands costs
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
"""What each of them says, by the name of the setting."""


def preset(name: str, stated: Mapping[str, Any] = MappingProxyType({})) -> PrioritySettings:
    """The section [priority] under a preset, and what is stated on top of it. `auto` begins as `fair`."""
    return PrioritySettings(**{"preset": name, **PRESETS[FAIR if name == AUTO else name], **stated})


def under_preset(settings: Settings, name: str) -> Settings:
    """These settings as they would be under another of the four presets: all that their file states stays.

    They keep the name of the preset that was asked for, which may be `auto`.
    """
    stated = {key: getattr(settings.priority, key) for key in settings.stated}
    priority = replace(preset(name, stated), preset=settings.priority.preset)
    return replace(settings, priority=priority)
