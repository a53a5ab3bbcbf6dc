"""A preset is a set of defaults of [priority] under one name; what the file states wins over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpusched.addons.simulate.policies import policies_of, under
from gpusched.config import SETTINGS, Loaded, load_settings
from gpusched.errors import UsageError
from gpusched.model.planner_settings import AUTO, PRESET_NAMES, PrioritySettings
from gpusched.model.presets import FAIR, FIFO, PRESETS, SLURM, THROUGHPUT, preset, under_preset
from gpusched.model.settings import Settings
from gpusched.model.value import fields, replace


def load(folder: Path, text: str, **more: Any) -> Loaded:
    path = folder / "config.toml"
    path.write_text(text, encoding="utf-8")
    return load_settings(str(path), {}, **more)


def test_without_a_file_fair_holds() -> None:
    assert Settings() == load_settings(None, {}).settings
    assert Settings().priority == preset(FAIR)
    assert Settings().priority.preset == FAIR


@pytest.mark.parametrize("name", PRESETS)
def test_every_value_of_a_preset_is_valid_in_a_file(name: str) -> None:
    for key, value in PRESETS[name].items():
        known = SETTINGS[f"priority.{key}"]
        assert known.read(value) == value
        assert known.rule is None or known.rule.admits(value)


def test_presets_other_than_fair_do_not_depend_on_its_backfill() -> None:
    names = {one.name for one in fields(PrioritySettings)}
    backfill = {name for name in names if name.startswith("backfill")} | {"order", "predict"}
    weights = {name for name in names if name.startswith("weight_")}
    for name, values in PRESETS.items():
        if name != FAIR:
            assert backfill <= values.keys()
    assert weights <= PRESETS[SLURM].keys()


def test_presets_differ_from_each_other() -> None:
    made = [replace(preset(name), preset=FAIR) for name in PRESETS]
    assert all(one not in made[:at] for at, one in enumerate(made))


@pytest.mark.parametrize("name", [THROUGHPUT, FIFO, SLURM])
def test_a_file_with_a_preset_has_its_values(tmp_path: Path, name: str) -> None:
    loaded = load(tmp_path, f'[priority]\npreset = "{name}"\n')
    assert loaded.settings.priority == preset(name)
    assert loaded.settings.stated == ()
    for key in PRESETS[name]:
        assert loaded.origin[f"priority.{key}"] == f"preset {name}"
    assert loaded.origin["priority.preset"].endswith("line 2")
    assert loaded.origin["priority.calc_period_s"] == "default"


def test_stated_settings_override_the_preset(tmp_path: Path) -> None:
    loaded = load(tmp_path, '[priority]\nweight_fairshare = 7\nbackfill_by = "limit"\npreset = "throughput"\n')
    priority = loaded.settings.priority
    assert (priority.order, priority.weight_fairshare, priority.backfill_by) == ("response_ratio", 7.0, "limit")
    assert loaded.settings.stated == ("backfill_by", "weight_fairshare")
    assert loaded.origin["priority.backfill_by"].endswith("line 3")
    assert loaded.origin["priority.order"] == "preset throughput"


def test_an_override_takes_precedence_over_the_preset(tmp_path: Path) -> None:
    loaded = load(tmp_path, '[priority]\npreset = "fifo"\n', overrides={"priority.order": "sjf"})
    assert loaded.settings.priority.order == "sjf"


def test_an_unknown_preset_is_refused_with_the_choices(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load(tmp_path, '[priority]\npreset = "quick"\n')
    assert "line 2: priority.preset is 'quick'" in caught.value.message
    assert all(name in caught.value.message for name in PRESET_NAMES)


def test_auto_begins_as_fair_and_takes_the_values_of_the_choice(tmp_path: Path) -> None:
    text = f'[priority]\npreset = "{AUTO}"\nweight_age = 5\n'
    assert load(tmp_path, text).settings.priority == replace(preset(FAIR, {"weight_age": 5.0}), preset=AUTO)
    chosen = load(tmp_path, text, chosen=SLURM)
    assert chosen.settings.priority == replace(preset(SLURM, {"weight_age": 5.0}), preset=AUTO)
    assert chosen.origin["priority.weight_short"] == "preset slurm, chosen by auto"
    assert chosen.origin["priority.weight_age"].endswith("line 3")


def test_a_choice_applies_under_auto_alone(tmp_path: Path) -> None:
    assert load(tmp_path, '[priority]\npreset = "fifo"\n', chosen=SLURM).settings.priority == preset(FIFO)


def test_other_presets_can_be_applied_below_stated_settings(tmp_path: Path) -> None:
    settings = load(tmp_path, '[priority]\npreset = "auto"\nweight_age = 5\n[gpu]\nids = "uuid"\n').settings
    for name in PRESETS:
        laid = under_preset(settings, name)
        assert (
            laid
            == load(
                tmp_path, '[priority]\npreset = "auto"\nweight_age = 5\n[gpu]\nids = "uuid"\n', chosen=name
            ).settings
        )
    assert under_preset(under_preset(settings, THROUGHPUT), FAIR) == settings


def test_presets_are_simulation_policies() -> None:
    policies = policies_of(list(PRESETS))
    assert [one.settings for one in policies] == [Settings(priority=preset(name)) for name in PRESETS]
    assert [one.predict for one in policies] == ["own", "own", "own", "none"]


def test_auto_is_not_a_simulation_policy() -> None:
    with pytest.raises(UsageError, match="auto selects one of the other presets and is not a policy itself") as caught:
        policies_of([AUTO])
    assert caught.value.hint == "--policy fair,throughput,fifo,slurm"


def test_a_recorded_snapshot_can_be_replayed_under_a_preset(tmp_path: Path) -> None:
    recorded = load(tmp_path, '[priority]\nweight_nice = 5\n[placement]\nstrategy = "spread"\n').settings
    made = under(recorded, THROUGHPUT)
    assert (made.priority.order, made.priority.weight_nice) == (PRESETS[THROUGHPUT]["order"], 5.0)
    assert made.placement.strategy == "spread"
