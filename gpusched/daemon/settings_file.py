"""The settings of this daemon: its config file, and for the machine's daemon the last one that it could use.

A typo in the file must not leave a machine without its scheduler when it is restarted or booted. So the daemon of root
keeps a copy of each file that it has begun to use, and starts on that copy when the file is wrong. Whoever can mend it
is told with every command until then.
"""

from __future__ import annotations

import os
import time
from logging import getLogger

from gpusched import paths
from gpusched.config import Loaded, load_settings
from gpusched.errors import GpuschedError, NotReady, UsageError
from gpusched.model.settings import Settings
from gpusched.model.value import replace

from .auto_preset import read_state
from .reloading import check_promises

log = getLogger("gpusched.daemon")

_RELOAD = "then: sudo systemctl reload gpusched"
_HINT = f"mend the config file (gpusched config check says all of it), {_RELOAD}"
RUNNING_PER_USER = 1000
"""Of a scheduler for all: whoever asks for no core could otherwise have a hundred thousand supervisors of root's."""


class SettingsFile:
    """Reads the config file; `problem` says why the settings in force are not those of the file, and what to do."""

    def __init__(self) -> None:
        self.problem: tuple[str, str] | None = None
        self._chosen = read_state(paths.preset_file()).in_force
        """The preset in force where the file says `auto`."""
        self._accepted = os.path.join(paths.state_dir(), "config.accepted.toml")

    def read(self) -> Loaded:
        """The settings as they are in the file now. Raises: SettingsError; NotReady for one that others may write."""
        if paths.is_system():
            _check_trusted(paths.config_file())
        return _completed(load_settings(paths.config_file(), os.environ, chosen=self._chosen))

    def choose(self, preset: str) -> None:
        """From now on this preset is in force where the file says `auto`."""
        self._chosen = preset

    def at_start(self) -> Settings:
        """Those of the file, or of the last file that was accepted. Raises: SettingsError, UsageError, NotReady."""
        try:
            settings = self.read().settings
            check_promises(settings)
            return settings
        except (UsageError, NotReady) as error:
            return self.fall_back(error)

    def fall_back(self, error: GpuschedError) -> Settings:
        """The last settings that were accepted, as the daemon cannot start on those of the file. Raises: the error."""
        found = self._last_accepted() if paths.is_system() and self.problem is None else None
        if found is None:
            raise error
        settings, at = found
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
        # What is right in itself and does not fit this machine, no look at the file would show.
        hint = f"{error.hint}; {_RELOAD}" if isinstance(error, NotReady) and error.hint else _HINT
        self.problem = f"{error.message}; until that is mended the settings of {used} hold", hint
        return settings

    def accept(self, settings: Settings) -> None:
        """The daemon goes by the file as it is now: keep a copy for a restart after it was changed for the worse.

        None is kept of a file with settings that count from the next start only, which may not succeed with them.
        """
        self.problem = None
        if not paths.is_system():
            return
        draft = f"{self._accepted}.new"
        try:
            try:
                with open(paths.config_file(), "rb") as file:
                    content = file.read()
            except FileNotFoundError:
                content = b""
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(content)
            # Another one may have been written since the settings were read.
            if self._load_copy(draft).settings == settings:
                os.replace(draft, self._accepted)
            else:
                os.unlink(draft)
        except (OSError, UsageError) as error:
            log.warning("no copy of the settings was kept: %s", error)

    def _last_accepted(self) -> tuple[Settings, float] | None:
        try:
            at = os.stat(self._accepted).st_mtime
            settings = self._load_copy(self._accepted).settings
            check_promises(settings)
        except (OSError, UsageError):
            # Of an older release, whose settings had other names.
            return None
        return settings, at

    def _load_copy(self, path: str) -> Loaded:
        # A variable that names another file would win over the path.
        environment = {key: text for key, text in os.environ.items() if key != "GPUSCHED_CONFIG"}
        return _completed(load_settings(path, environment, chosen=self._chosen))


def _completed(loaded: Loaded) -> Loaded:
    limit = loaded.settings.limit
    if not paths.is_system() or limit.running_per_user is not None:
        return loaded
    limit = replace(limit, running_per_user=RUNNING_PER_USER)
    return replace(loaded, settings=replace(loaded.settings, limit=limit))


def _check_trusted(file: str) -> None:
    """Refuse settings that somebody other than root may write: what they say runs as root."""
    for path in (file, os.path.dirname(file)):
        try:
            found = os.stat(path)
        except OSError:
            continue
        if found.st_uid != 0 or found.st_mode & 0o022:
            raise NotReady(
                f"{path} can be written to by others than root, and the daemon of root does what it says",
                f"chown root {path} && chmod go-w {path}",
            )
