"""Settings come from where they should, and nonsense is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpusched.config import SETTINGS, TABLE_SETTINGS, Loaded, Setting, load_settings
from gpusched.config.schema import OF_ADD_ONS
from gpusched.errors import UsageError
from gpusched.model.settings import Settings
from gpusched.model.value import Value, fields, replace


def write(folder: Path, text: str) -> str:
    path = folder / "config.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def load(folder: Path, text: str, **environment: str) -> Loaded:
    return load_settings(write(folder, text), environment)


def refusal(folder: Path, text: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        load(folder, text)
    assert str(folder) in caught.value.message
    assert caught.value.hint
    assert "\n" not in caught.value.message
    return caught.value


# --- where values come from -----------------------------------------------------------------------


def test_without_a_file_everything_is_default() -> None:
    loaded = load_settings(None, {})
    assert loaded.settings == Settings()
    assert set(loaded.origin.values()) == {"default"}


def test_a_missing_file_is_an_error_only_if_it_was_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.toml")
    assert load_settings(missing, {}).settings == Settings()
    with pytest.raises(UsageError, match="there is no config file") as caught:
        load_settings(None, {"GPUSCHED_CONFIG": missing})
    assert missing in caught.value.message


def test_each_layer_overrides_the_previous_ones(tmp_path: Path) -> None:
    path = write(tmp_path, '[gpu]\nfake = "1x8GiB"\nids = "uuid"\n[daemon]\npoll_s = 2\n')
    loaded = load_settings(path, {"GPUSCHED_FAKE_GPUS": "4x24GiB"}, {"daemon.poll_s": 0.5, "node.cpus": 8})
    assert loaded.settings.gpu.ids == "uuid"
    assert loaded.settings.gpu.fake == "4x24GiB"
    assert loaded.settings.daemon.poll_s == 0.5
    assert loaded.settings.node.cpus == 8.0
    where = {path for path, origin in loaded.origin.items() if origin == "default"}
    assert where == set(SETTINGS) - {
        "gpu.ids",
        "gpu.fake",
        "gpu.source",
        "daemon.poll_s",
        "node.cpus",
    }
    assert loaded.origin["gpu.ids"] == f"file {path}, line 3"
    assert loaded.origin["gpu.fake"] == "environment GPUSCHED_FAKE_GPUS"
    assert loaded.origin["daemon.poll_s"] == "override"


def test_the_file_named_by_the_environment_precedes_the_usual_one(tmp_path: Path) -> None:
    usual = write(tmp_path, "[node]\ncpus = 1\n")
    other = tmp_path / "other.toml"
    other.write_text("[node]\ncpus = 2\n")
    loaded = load_settings(usual, {"GPUSCHED_CONFIG": str(other)})
    assert loaded.settings.node.cpus == 2
    assert loaded.origin["node.cpus"] == f"file {other}, line 2"
    assert load_settings(usual, {"GPUSCHED_CONFIG": ""}).settings.node.cpus == 1


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("", "simulated"),
        ('[gpu]\nsource = "auto"\n', "simulated"),
        ('[gpu]\nsource = "none"\n', "none"),
        ('[gpu]\nsource = "nvml"\n', "nvml"),
    ],
)
def test_simulated_gpus_of_the_environment_are_used_by_default(tmp_path: Path, text: str, source: str) -> None:
    assert load(tmp_path, text, GPUSCHED_FAKE_GPUS="2x8GiB").settings.gpu.source == source
    assert load(tmp_path, text, GPUSCHED_FAKE_GPUS="").settings.gpu.fake is None


def test_values_get_the_type_of_their_setting(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        """
        [node]
        cpus = 8
        mem_mib = 65536
        [priority]
        backfill = false
        [submit]
        env_exclude = ["*_TOKEN", "AWS_*", "!AWS_REGION"]
        [default]
        time_limit_s = 86400
        """,
    ).settings
    assert isinstance(settings.node.cpus, float)
    assert settings.node.mem_mib == 65536
    assert settings.priority.backfill is False
    assert settings.submit.env_exclude == ("*_TOKEN", "AWS_*", "!AWS_REGION")
    assert settings.default.time_limit_s == 86400


def test_all_settings_are_listed_with_value_and_origin(tmp_path: Path) -> None:
    rows = list(load(tmp_path, "[gpu]\nfree_polls = 3\n").values())
    assert [path for path, _, _ in rows] == list(SETTINGS)
    assert ("gpu.free_polls", 3, f"file {tmp_path}/config.toml, line 2") in rows
    assert ("gpu.ids", "index", "default") in rows


# --- what is known of each -------------------------------------------------------------------------


def test_every_field_is_described() -> None:
    paths = [
        f"{section.name}.{item.name}"
        for section in fields(Settings)
        if isinstance(getattr(Settings(), section.name), Value)
        for item in fields(section.type)
    ]
    paths += [f"{section}.{item.name}" for section, kind in OF_ADD_ONS.items() for item in fields(kind)]
    assert list(SETTINGS) == [*paths, "plugins.load"]
    assert all(one.allowed for one in SETTINGS.values())


def test_every_setting_documents_its_values() -> None:
    everything = [*SETTINGS.values(), *(one for table in TABLE_SETTINGS.values() for one in table.values())]
    assert [one.path for one in everything if one.rule is None and one.type is not bool] == []


@pytest.mark.parametrize(
    "known", [known for known in SETTINGS.values() if known.default is not None], ids=lambda known: known.path
)
def test_every_default_is_valid_in_a_file(tmp_path: Path, known: Setting) -> None:
    section, _, name = known.path.partition(".")
    value = list(known.default) if isinstance(known.default, tuple) else known.default
    # Tables are written the same way in both, when they are empty.
    loaded = load(tmp_path, f"[{section}]\n{name} = {json.dumps(value)}\n")
    assert replace(loaded.settings, stated=()) == Settings()
    assert loaded.origin[known.path].startswith("file ")


# --- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "path", "wanted"),
    [
        ("[life]\ngrace_s = -1", "life.grace_s", "at least 0"),
        ("[daemon]\npoll_s = 0", "daemon.poll_s", "at least 0.001"),
        ("[daemon]\npoll_s = -1.5", "daemon.poll_s", "at least 0.001"),
        ("[node]\ncpus = 0", "node.cpus", "above 0"),
        ("[node]\ncpus = -4", "node.cpus", "above 0"),
        ("[node]\ncpus = inf", "node.cpus", "a number"),
        ("[node]\ncpus = nan", "node.cpus", "a number"),
        ("[node]\ncpus = 1" + "0" * 400, "node.cpus", "a number"),
        ('[node]\ncpus = "8"', "node.cpus", "a number"),
        ("[node]\ncpus = true", "node.cpus", "a number"),
        ("[node]\nmem_mib = 1.5", "node.mem_mib", "a whole number"),
        ("[node]\nmem_mib = true", "node.mem_mib", "a whole number"),
        ("[node]\nmem_mib = 1" + "0" * 30, "node.mem_mib", "at most 1099511627776"),
        ('[node]\nname = "two words"', "node.name", "one word"),
        ('[node]\nname = ""', "node.name", "one word"),
        ('[gpu]\nsource = "cuda"', "gpu.source", "one of auto, nvml, amdsmi, simulated, static, none"),
        ('[gpu]\nids = "name"', "gpu.ids", "one of index, uuid"),
        ('[gpu]\nfake = "a\\nb"', "gpu.fake", "on one line"),
        ("[gpu]\nfree_polls = 0", "gpu.free_polls", "at least 1"),
        ("[gpu]\ndeadline_s = 0", "gpu.deadline_s", "above 0"),
        ("[ceiling]\ncpu_fraction = 90", "ceiling.cpu_fraction", "at most 1"),
        ("[ceiling]\ncpu_fraction = 0", "ceiling.cpu_fraction", "above 0"),
        ('[daemon]\nlog_level = "loud"', "daemon.log_level", "one of debug, info, warning, error"),
        ("[daemon]\nlog_level = 3", "daemon.log_level", "one of debug, info"),
        ("[daemon]\nlog_files = 0", "daemon.log_files", "at least 1"),
        ('[submit]\nenv_exclude = "*_TOKEN"', "submit.env_exclude", "a list of name patterns"),
        ('[submit]\nenv_exclude = ["A", 3]', "submit.env_exclude", "a list of name patterns"),
        ('[submit]\nenv_exclude = [""]', "submit.env_exclude", "each one word without spaces"),
        ("[priority]\nbackfill = 1", "priority.backfill", "true or false"),
        ('[priority]\nbackfill = "yes"', "priority.backfill", "true or false"),
        ("[default]\ntime_limit_s = 0", "default.time_limit_s", "at least 1"),
        ('[default]\nqueue = "a b"', "default.queue", "one word"),
        ("[limit]\nbatch = 0", "limit.batch", "at least 1"),
    ],
)
def test_an_invalid_value_is_refused_by_name(tmp_path: Path, text: str, path: str, wanted: str) -> None:
    error = refusal(tmp_path, text)
    assert f"config.toml, line 2: {path} is " in error.message
    assert wanted in error.message


def test_a_refusal_quotes_the_value_once_and_safely(tmp_path: Path) -> None:
    error = refusal(tmp_path, '[gpu]\nids = "\\u001b[31m' + "x" * 500 + '"')
    assert "\x1b" not in error.message
    assert len(error.message) < 400


@pytest.mark.parametrize(
    ("text", "unknown", "hint"),
    [
        ("[gpus]\nids = 'uuid'", "unknown section gpus", "did you mean gpu?"),
        ("[zebra]\nx = 1", "unknown section zebra", "sections: priority, ceiling, node, gpu"),
        ("[gpu]\nid = 'uuid'", "unknown setting gpu.id", "did you mean gpu.ids?"),
        ("[daemon]\npolls = 1", "unknown setting daemon.polls", "did you mean daemon.poll_s?"),
        ("[node]\nmax_requeues = 1", "unknown setting node.max_requeues", "did you mean life.max_requeues?"),
        ("[node]\nwxyzq = 1", "unknown setting node.wxyzq", "[node] has: name, cpus, mem_mib"),
        ("poll_s = 1", "unknown section poll_s", "daemon.poll_s"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(tmp_path: Path, text: str, unknown: str, hint: str) -> None:
    error = refusal(tmp_path, text)
    assert unknown in error.message
    assert hint in error.hint


def test_a_scalar_section_is_refused(tmp_path: Path) -> None:
    assert "write [gpu] on a separate line" in refusal(tmp_path, "gpu = 4").message


@pytest.mark.parametrize("text", ["[gpu\n", "gpu ids = 3", "[gpu]\nids = 'a'\nids = 'b'\n", "x = \0"])
def test_invalid_toml_is_refused_with_its_position(tmp_path: Path, text: str) -> None:
    error = refusal(tmp_path, text)
    assert "is not valid TOML" in error.message
    assert "line" in error.message


def test_a_deeply_nested_file_is_refused(tmp_path: Path) -> None:
    assert "is not valid TOML" in refusal(tmp_path, "x = " + "[" * 5000 + "]" * 5000).message


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not valid TOML"):
        load_settings(str(path), {})


def test_a_folder_instead_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: is a directory"):
        load_settings(str(tmp_path), {})


def test_overrides_follow_the_same_rules() -> None:
    with pytest.raises(UsageError, match="override: daemon.poll_s is -1; it must be a number of at least 0.001"):
        load_settings(None, {}, {"daemon.poll_s": -1})
    with pytest.raises(UsageError, match="unknown setting daemon.pol_s") as caught:
        load_settings(None, {}, {"daemon.pol_s": 1})
    assert caught.value.hint == "did you mean daemon.poll_s?"


def test_simulated_gpus_of_the_environment_are_validated_too() -> None:
    with pytest.raises(UsageError, match="environment GPUSCHED_FAKE_GPUS: gpu.fake is"):
        load_settings(None, {"GPUSCHED_FAKE_GPUS": "a\nb"})
