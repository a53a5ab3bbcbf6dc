"""Settings from defaults, the TOML file, the environment and explicit values, later ones overriding earlier ones.

schema          the available settings, from `model.settings`
toml_lines      the line of each key in a file
contradictions  errors across settings: cycles, unknown names, guarantees above maxima
without_effect  valid settings that change nothing, for want of another
load            reads file, environment and values, with a sentence for each error
"""

from gpusched.config.load import Loaded, SettingsError, load_settings, problems_in
from gpusched.config.schema import SETTINGS, TABLE_SETTINGS, Setting

__all__ = ["SETTINGS", "TABLE_SETTINGS", "Loaded", "Setting", "SettingsError", "load_settings", "problems_in"]
