from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

from ray.exceptions import AuthenticationError

ROOT = Path(os.environ["FAKE_RAY"])


class GcsClient:
    def __init__(self, address: str) -> None:
        given = ""
        if os.environ["RAY_AUTH_MODE"] == "token":
            given = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text()
        if given != (ROOT / "token").read_text() and not (ROOT / "open").exists():
            raise AuthenticationError("InvalidAuthToken")

    def get_all_node_info(self) -> dict[str, SimpleNamespace]:
        nodes = [(name, address, False) for name, (address, _) in json.loads((ROOT / "nodes.json").read_text()).items()]
        if (ROOT / "head.json").exists():
            nodes.append((*json.loads((ROOT / "head.json").read_text()), True))
        return {
            name: SimpleNamespace(node_name=name, node_manager_address=address, state=0, is_head_node=is_head)
            for name, address, is_head in nodes
        }
