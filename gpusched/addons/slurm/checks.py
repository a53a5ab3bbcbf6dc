"""What the core's `config` finds of `[handover]` that has no effect."""

from __future__ import annotations

from gpusched.addons.slurm.settings import handover_settings
from gpusched.config.without_effect import Rule

RULES = (
    Rule(
        "handover",
        ("folder", "poll_interval_s", "deadline_s", "lost_after_s"),
        lambda settings: handover_settings(settings).commands is not None,
        "without commands no job is handed over",
        'set commands = "/usr/bin" in [handover], or leave it out',
    ),
)
