"""Generated cases are judged by what they find, not by how fast a busy machine runs them."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("gpusched", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gpusched")
