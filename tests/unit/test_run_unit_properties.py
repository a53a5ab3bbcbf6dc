"""What systemd is told of a run's unit, where it reads things in its own way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gpusched.engine import systemd
from gpusched.engine.launchers import UnitNames
from gpusched.engine.systemd import Program, properties


def told(epilog: str | None = None, **ticket: Any) -> dict[str, Any]:
    base = {
        "run": "7.2",
        "grace_s": 30.0,
        "leftover_grace_s": 2.0,
        "private_tmp": False,
        "launch": SimpleNamespace(epilog=epilog),
        "site_epilog": None,
        "epilog_timeout_s": 60.0,
        "limits": None,
        **ticket,
    }
    program = Program(("/opt/a$b/python", "-c", "import $x; main()", "100%"), {"PATH": "/bin"})
    return dict(properties(SimpleNamespace(**base), UnitNames(), program, (0, 1, 2)))  # type: ignore[arg-type]


def test_dollars_in_the_command_are_not_expanded() -> None:
    """And the property is one that systemd 252 finds again after a daemon-reload, which it does not of ExecStartEx."""
    found = told()
    assert "ExecStartEx" not in found
    signature, ((path, argv, ignores_failure),) = found["ExecStart"]
    assert (signature, ignores_failure) == ("a(sasb)", False)
    assert path == "/opt/a$b/python"
    assert argv == ["/opt/a$$b/python", "-c", "import $$x; main()", "100%"]


def test_the_program_of_a_unit_has_no_semicolon() -> None:
    """systemd 252 warns of its own escape for it at every daemon-reload, once for each run."""
    assert ";" not in systemd.UNIT_PROGRAM


def test_the_daemon_is_stopped_first_when_the_machine_goes_down() -> None:
    """What is before it is stopped after it: the daemon is there to end them."""
    assert told()["Before"] == ("as", ["gpusched.service"])
    assert told()["KillMode"] == ("s", "mixed")


def test_a_unit_that_is_stopped_leaves_time_for_its_epilogs() -> None:
    plain = told()["TimeoutStopUSec"][1]
    site = SimpleNamespace(path="/e", timeout_s=100.0)
    assert told(epilog="./e", site_epilog=site)["TimeoutStopUSec"][1] - plain == 160 * 1_000_000
