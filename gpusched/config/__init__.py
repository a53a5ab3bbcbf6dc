"""Settings from defaults, the TOML file, the environment and explicit values, the later ones winning.

schema          the settings there are, from `model.settings`
toml_lines      where in a file a key was written
contradictions  what single values do not show: circles, unknown names, guarantees above maxima
load            file, environment and values taken in, with a sentence for each mistake
"""

from gpusched.config.load import Loaded, SettingsError, load_settings, problems_in
from gpusched.config.schema import SETTINGS, TABLE_SETTINGS, Setting

__all__ = ["SETTINGS", "TABLE_SETTINGS", "Loaded", "Setting", "SettingsError", "load_settings", "problems_in"]
