"""Plug-ins of a real daemon: named in its config file, told of what jobs do, reported when they fail."""

from __future__ import annotations

import os

RULES = """
import os
from gpusched.plugins import hookimpl

@hookimpl
def gpusched_permit(key):
    return "ask first" if key.request.cpus > 1 else None

@hookimpl
def gpusched_job_changed(before, after):
    with open(os.environ["SEEN"], "a") as file:
        file.write(f"{after.id} {before and before.state} {after.state}\\n")
    if after.spec.name == "trip":
        raise RuntimeError("stumbled")
"""


def test_a_plugin_takes_part_and_cannot_stop_the_loop(make_daemon, tmp_path):
    (tmp_path / "site_rules.py").write_text(RULES)
    seen = tmp_path / "seen"
    daemon = make_daemon(start=False, config='[plugins]\nload = ["site_rules"]\n')
    path = os.pathsep.join(filter(None, [str(tmp_path), daemon.env.get("PYTHONPATH")]))
    daemon.env |= {"SEEN": str(seen), "PYTHONPATH": path}
    daemon.start()
    daemon.wait(daemon.submit("true"))
    held = daemon.submit("true", cpus=2)
    daemon.wait(daemon.submit("true", name="trip"), daemon.submit("true"))
    why = daemon.call("GET", f"/v1/jobs/{held}/why")["why"]
    assert (why["reason"], why["text"]) == ("Plugin", "site_rules: ask first")
    lines = [line.split() for line in seen.read_text().splitlines()]
    assert lines[0][:2] == ["1", "None"]
    assert lines[-1][2] != "PENDING" or len(lines) > 3
    assert ["1", "RUNNING", "COMPLETED"] in lines or ["1", "COMPLETING", "COMPLETED"] in lines
    checks = {check["check"]: check for check in daemon.call("GET", "/v1/doctor")["checks"]}
    assert not checks["plugins"]["ok"]
    assert "RuntimeError: stumbled" in checks["plugins"]["text"]


def test_a_plugin_that_cannot_be_imported_prevents_the_start(make_daemon):
    daemon = make_daemon(start=False, config='[plugins]\nload = ["no_such_rules"]\n')
    assert "no_such_rules" in daemon.try_start()
    daemon.reap()
