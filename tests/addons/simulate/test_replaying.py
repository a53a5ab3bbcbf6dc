"""`gpusched debug snapshot` as typed, and `gpusched replay` of what it wrote."""

from __future__ import annotations

import json
import stat

from shell import Shell
from support import wait_until


def test_a_recorded_input_replays_to_the_same_decision(own: Shell) -> None:
    config = own.home / "config.toml"
    config.write_text(f"{config.read_text()}[priority]\nreserve_after_s = 0\nreserve_after_runs = 0\n")
    own.ok("gpusched", "daemon", "start")
    first = own.submit("-g", "2", "-t", "1h", "--", "sleep", "600")
    wait_until(lambda: '"RUNNING"' in own.ok("gq", "--json"), what="the first job to run")
    second = own.submit("-g", "2", "-t", "2h", "--", "sleep", "600", "--token=hush-hush")
    array = own.submit("-g", "1", "-t", "30", "-a", "3-5", "--", "sleep", "600")
    path = own.work / "now.json"
    path.write_text("what was there before is replaced")
    assert own.ok("gpusched", "debug", "snapshot", str(path)) == f"wrote {path}: 1 job runs, 4 wait\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in own.work.iterdir() if one.name.startswith(".now")] == []
    assert "hush-hush" not in path.read_text()
    # Without a daemon, from here on.
    own.env["GPUSCHED_SOCKET"] = str(own.work / "nobody")
    shown = own.ok("gpusched", "replay", str(path))
    assert "nothing starts now" in shown
    assert "1 job runs, 4 wait" in shown
    made = json.loads(own.ok("gpusched", "replay", str(path), "--json"))
    assert [one["job"] for one in made["plan"]["reservations"]] == [second]
    assert {one["first"]: one["jobs"] for one in made["plan"]["waiting"]} == {second: 1, f"{array}_3": 3}
    assert f"job {array}_4 under the recorded settings" in own.ok(
        "gpusched", "replay", str(path), "--job", f"{array}_4"
    )
    assert own.ok("gpusched", "replay", str(path), "--job", first, "-q") == "runs\n"
    text = path.read_text()
    done = own.type("gpusched", "replay", "-", "-q", "--job", second, stdin=text.encode())
    assert (done.code, done.out) == (0, "Resources\n")
    del own.env["GPUSCHED_SOCKET"]


def test_standard_output_receives_the_same_document(sh: Shell) -> None:
    made = json.loads(sh.ok("gpusched", "debug", "snapshot"))
    assert made == json.loads(sh.ok("gpusched", "debug", "snapshot", "-")) | {"snapshot": made["snapshot"]}
    assert (made["schema_version"], made["snapshot_version"], made["plugins"]) == (1, 2, [])
    assert set(made) == {"schema_version", "snapshot_version", "release", "plugins", "names", "snapshot", "settings"}


def test_an_unwritable_target_is_reported(sh: Shell) -> None:
    for where, text in (("/", "/ is a folder, not a file"), ("/nowhere/x", "no folder /nowhere")):
        done = sh.type("gpusched", "debug", "snapshot", where)
        assert done.code == 1
        assert text in done.err
        assert "hint: " in done.err
