"""Policies by name: those of the literature, gpusched's own, and that of the settings that are in force here.

fcfs, sjf+easy, ...   the rules of the literature, see `rules`
default               gpusched as it comes, or with the settings of a file
fair, throughput, ... gpusched as it comes, under another preset
present               with the settings that the daemon of this machine reads
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gpusched import paths
from gpusched.config import load_settings
from gpusched.config.load import CONFIG_VARIABLE
from gpusched.daemon.auto_preset import read_state
from gpusched.errors import NotFound, UsageError
from gpusched.model.presets import PRESETS, preset
from gpusched.model.settings import AUTO, Settings
from gpusched.model.value import Value, replace
from gpusched.simulate import predicting
from gpusched.simulate.daemon_run import may_preempt
from gpusched.simulate.rules import rules_of

DEFAULT, PRESENT = "default", "present"


class Policy(Value):
    """One policy to be simulated."""

    name: str
    settings: Settings
    orders_by_run_time: bool = False
    """It is told how long each job will run."""
    predict: str | None = None
    """How run times are guessed, by a name of `predicting`; None: they are not."""


def policies_of(
    names: Sequence[str], config: Path | None = None, predict: str | None = None, *, is_exact: bool = False
) -> list[Policy]:
    """The policies of these names, `NAME[:PREDICTION]`; `config` is the file of `default`.

    Args:
        predict: how run times are guessed under those that say nothing of it.
        is_exact: estimates are the run times, so that no settings need to guess them.

    Raises: UsageError for a name that is none; SettingsError for settings that cannot be used.
    """
    if config is not None and DEFAULT not in [name.partition(":")[0] for name in names]:
        raise UsageError(
            f"no policy goes by {config}: it says what the policy default is", f"--policy {DEFAULT},{','.join(names)}"
        )
    return [_policy_of(name, config, predict, is_exact=is_exact) for name in names]


def _policy_of(text: str, config: Path | None, predict: str | None, *, is_exact: bool) -> Policy:
    name, _, own = text.partition(":")
    found = _named(name, config)
    found = replace(found, name=text, predict=own or predict or (None if is_exact else found.predict))
    predicting.check(found.predict, found.settings.priority.order, orders_by_run_time=found.orders_by_run_time)
    return found


def _named(name: str, config: Path | None) -> Policy:
    if name == DEFAULT:
        if config is None:
            return _of_daemon(name, Settings())
        if not config.is_file():
            raise NotFound(f"there is no config file {config}", "see what is in force: gpusched config show")
        return _of_daemon(name, load_settings(None, {CONFIG_VARIABLE: str(config)}).settings)
    if name == PRESENT:
        chosen = read_state(paths.preset_file()).in_force
        return _of_daemon(name, load_settings(paths.config_file(), os.environ, chosen=chosen).settings)
    if name in PRESETS:
        return _of_daemon(name, Settings(priority=preset(name)))
    if name == AUTO:
        raise UsageError(
            f"the preset {AUTO} is whichever of the others serves best, and no policy of its own",
            f"--policy {','.join(PRESETS)}",
        )
    rules = rules_of(name)
    return Policy(name, rules.settings(), rules.orders_by_run_time)


def _of_daemon(name: str, settings: Settings) -> Policy:
    """One that predicts as the daemon does under these settings."""
    return Policy(name, settings, predict=predicting.OWN if settings.priority.predict else predicting.NONE)


def refuse_fast(policy: Policy) -> None:
    """Raises: UsageError for settings under which more happens than a policy that is asked alone can do."""
    settings = policy.settings
    why = None
    if may_preempt(settings):
        why = "runs make room for others"
    else:
        tables = (("queues", settings.queue), ("QOS", settings.qos), ("accounts", settings.account))
        named = [f"{what} ({', '.join(sorted(table))})" for what, table in tables if table]
        if named:
            why = f"{' and '.join(named)} decide who may submit what"
    if why is not None:
        raise UsageError(
            f"under the policy {policy.name} {why}, which the fast simulation does not do",
            "let all that the daemon does happen: --tick",
        )
