from __future__ import annotations

import json
import platform

from ray._raylet import ROOT


def get_cluster_metadata(client: object) -> dict[str, str]:
    versions = ["2.60.0", platform.python_version()]
    if (ROOT / "versions").exists():
        versions = json.loads((ROOT / "versions").read_text())
    return {"ray_version": versions[0], "python_version": versions[1]}
