"""Settings from defaults, the TOML file, the environment and explicit values, the later ones winning.

rules           which values a setting may have
known           which settings there are, from `model.settings`
lines           where in a file a key was written
contradictions  what single values do not show: circles, unknown names, guarantees above maxima
mistakes        the sentences for what is wrong
reading         the file, taken in
load            all of it together
"""

from gpusched.config.known import SettingInfo, describe_settings, describe_tables
from gpusched.config.load import Loaded, load_settings, problems_in
from gpusched.config.mistakes import SettingsError

__all__ = [
    "Loaded",
    "SettingInfo",
    "SettingsError",
    "describe_settings",
    "describe_tables",
    "load_settings",
    "problems_in",
]
