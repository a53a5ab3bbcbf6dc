"""What root's own commands read: nothing that others could have written."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest
from people import BOB, NEEDS_ROOT, SystemDaemon

from gpusched.errors import Refused
from gpusched.store.backup import backup, restore

pytestmark = NEEDS_ROOT


def test_settings_writable_by_others_are_refused() -> None:
    daemon = SystemDaemon()
    try:
        for path in (daemon.settings, daemon.settings.parent):
            before = path.stat()
            os.chown(path, pwd.getpwnam(BOB).pw_uid, -1)
            assert "is writable by users other than root" in daemon.try_start()
            daemon.reap()
            os.chown(path, before.st_uid, -1)
            path.chmod(before.st_mode | 0o020)
            assert "is writable by users other than root" in daemon.try_start()
            daemon.reap()
            path.chmod(before.st_mode)
        daemon.start()
        # Nor at a reload.
        daemon.settings.chmod(0o666)
        daemon.settings.write_text("[limit]\nrequests_per_s = 1\n")
        assert "is writable by users other than root" in refusal_of_reload(daemon)
        daemon.settings.chmod(0o644)
        daemon.configure("")
    finally:
        daemon.close()


def refusal_of_reload(daemon: SystemDaemon) -> str:
    from gpusched.errors import GpuschedError

    with pytest.raises(GpuschedError) as caught:
        daemon.call("POST", "/v1/reload", {})
    return caught.value.message


def test_a_backup_others_could_have_made_is_not_restored(tmp_path: Path) -> None:
    daemon = SystemDaemon()
    try:
        daemon.start()
        daemon.submit("/bin/true", stdout="/dev/null")
        database, copy = str(daemon.state_dir / "gpusched.db"), tmp_path / "copy.db"
        backup(database, str(copy))
        assert copy.stat().st_mode & 0o077 == 0
        target = str(tmp_path / "target" / "gpusched.db")
        copy.chmod(0o622)
        with pytest.raises(Refused, match="can be written to by others"):
            restore(str(copy), target, hold=True)
        copy.chmod(0o600)
        os.chown(copy, pwd.getpwnam(BOB).pw_uid, -1)
        with pytest.raises(Refused, match=f"belongs to user {pwd.getpwnam(BOB).pw_uid}"):
            restore(str(copy), target, hold=True)
        os.chown(copy, 0, -1)
        assert restore(str(copy), target, hold=True).jobs == 1
    finally:
        daemon.close()
