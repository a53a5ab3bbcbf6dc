"""Variables that are left out of a job's environment, and of the job table: which, how to pass one on, who says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shell import Shell

from gpusched.api.validate import sift_environment
from gpusched.client import DaemonConnection
from gpusched.errors import UsageError
from gpusched.model.settings import Settings, SubmitSettings

SECRET = {"AWS_SECRET_ACCESS_KEY": "hush-1", "DB_PASSWORD": "hush-2"}
SHOWS = ("--", "/bin/sh", "-c", 'echo "<$AWS_SECRET_ACCESS_KEY> <$DB_PASSWORD> <$HF_TOKEN>"')

# --- which --------------------------------------------------------------------------------------

LEFT_OUT = (
    *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_CLIENT_SECRET", "SECRET_KEY", "PGPASSWORD", "SMTP_PASSWD"),
    *("BORG_PASSPHRASE", "DEPLOY_PRIVATE_KEY", "GITHUB_TOKEN", "GH_TOKEN", "VAULT_TOKEN", "db_password"),
)
PASSED_ON = (
    *("PATH", "HOME", "LD_LIBRARY_PATH", "WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "NEPTUNE_API_TOKEN"),
    *("COMET_API_KEY", "MLFLOW_TRACKING_PASSWORD", "CLEARML_API_SECRET_KEY", "GOOGLE_APPLICATION_CREDENTIALS"),
    *("OPENAI_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_REGION", "TOKENIZERS_PARALLELISM", "GITHUB_TOKENS_SEEN"),
)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_credentials_are_dropped_by_default(name: str) -> None:
    assert sift_environment({name: "x"}, (), Settings()) == ({}, (name,))
    assert sift_environment({name: "x"}, (name,), Settings()) == ({name: "x"}, ())


@pytest.mark.parametrize("name", PASSED_ON)
def test_training_variables_are_passed_by_default(name: str) -> None:
    assert sift_environment({name: "x"}, (), Settings()) == ({name: "x"}, ())


def test_patterns_from_the_settings_drop_and_keep_variables() -> None:
    env = dict.fromkeys(("A_TOKEN", "b_token", "HF_TOKEN", "DB_PASSWORD"), "x")
    settings = Settings(submit=SubmitSettings(("*_TOKEN", "!HF_*")))
    kept, excluded = sift_environment(env, (), settings)
    assert (sorted(kept), excluded) == (["DB_PASSWORD", "HF_TOKEN"], ("A_TOKEN", "b_token"))
    assert sift_environment(env, (), Settings(submit=SubmitSettings(()))) == (env, ())


# --- at the prompt ------------------------------------------------------------------------------


def output(sh: Shell, *words: str, **env: str) -> str:
    done = sh.type("gsub", "-W", "-o", "out", *words, **SECRET, HF_TOKEN="hf", **env)
    assert done.code == 0, done
    return (sh.work / "out").read_text().strip()


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ([], "<> <> <hf>"),
        (["--export", "ALL,AWS_SECRET_ACCESS_KEY"], "<hush-1> <> <hf>"),
        (["--export", "DB_PASSWORD"], "<> <hush-2> <>"),
        (["--export", "ALL,DB_PASSWORD=mine"], "<> <mine> <hf>"),
        (["-E", "DB_PASSWORD=mine"], "<> <mine> <hf>"),
    ],
    ids=["nothing named", "a name in --export", "a name without ALL", "a value in --export", "-E"],
)
def test_named_variables_are_passed(sh: Shell, options: list[str], wanted: str) -> None:
    assert output(sh, *options, *SHOWS) == wanted


def test_dropped_variables_are_not_in_the_job_table(own: Shell) -> None:
    output(own, *SHOWS)
    own.type("gsub", "-H", "-E", "DB_PASSWORD=hush-3", "--", "true")
    stored = b"".join(path.read_bytes() for path in own.home.glob("gpusched.db*"))
    assert b"HF_TOKEN=hf" in stored
    assert b"hush-3" in stored
    assert b"hush-1" not in stored
    assert b"hush-2" not in stored


def test_gsub_lists_dropped_variables_and_the_history_records_them(sh: Shell) -> None:
    names = "AWS_SECRET_ACCESS_KEY, DB_PASSWORD"
    said = f"not in the job's environment: {names}; pass one on with: --export ALL,AWS_SECRET_ACCESS_KEY\n"
    done = sh.type("gsub", "-v", "-H", "--", "true", **SECRET)
    assert done.err == f"gsub: {said}"
    assert sh.type("gsub", "-H", "--", "true", **SECRET).err == ""
    assert sh.type("gsub", "-v", "--parsable", "-H", "--", "true", **SECRET).err == ""
    assert sh.type("gsub", "-v", "-H", "--", "true").err == ""
    assert sh.type("gsub", "-v", "--dry-run", "--", "true", **SECRET).err == f"gsub: {said}"
    assert f"; not in its environment: {names}" in sh.ok("gshow", done.out.split()[-1])


def test_batches_pipelines_repeats_and_foreground_jobs_are_filtered_too(sh: Shell, tmp_path: Path) -> None:
    (sh.work / "lines").write_text("echo $DB_PASSWORD > batch\n")
    assert sh.type("gsub", "-v", "-W", "--batch", "lines", **SECRET).err.startswith("gsub: not in the job's")
    assert (sh.work / "batch").read_text() == "\n"
    (sh.work / "p.toml").write_text(
        '[step.plain]\nwrap = "echo $DB_PASSWORD > plain"\n'
        '[step.named]\nwrap = "echo $DB_PASSWORD > named"\nexport = "ALL,DB_PASSWORD"\n'
    )
    done = sh.type("gsub", "-v", "-W", "--dag", "p.toml", **SECRET)
    assert done.code == 0, done
    assert done.err.startswith("gsub: not in the job's environment: AWS_SECRET_ACCESS_KEY, DB_PASSWORD;")
    assert ((sh.work / "plain").read_text(), (sh.work / "named").read_text()) == ("\n", "hush-2\n")
    done = sh.type("grun", "-v", "--", "/bin/sh", "-c", "echo $DB_PASSWORD", **SECRET)
    assert (done.code, done.out) == (0, "\n")
    assert done.err.splitlines()[0].startswith("grun: not in the job's environment: AWS_SECRET_ACCESS_KEY")
    job_id = sh.submit("-W", "-o", "first", "-E", "DB_PASSWORD=given", *SHOWS)
    sh.ok("gsub", "--resubmit", job_id, "-W", "-o", "again", "-E", "HF_TOKEN=hf2")
    assert (sh.work / "again").read_text() == "<> <given> <hf2>\n"


def test_a_pipeline_with_names_that_are_not_lists_is_refused(sh: Shell) -> None:
    sh.ok("gq")
    step = {"step": "one", "spec": {"argv": ["true"], "work_dir": "/"}}
    body = {"name": "p", "source": "", "steps": [step], "environments": [{}], "dry_run": True}
    with DaemonConnection(str(sh.home / "run" / "api.sock")) as client:
        for named in ("A", ["A"], [[], []], [[3]]):
            with pytest.raises(UsageError):
                client.call("POST", "/v1/pipelines", {**body, "env_named": named})
        for environments in ([None], [{}], None):
            client.call("POST", "/v1/pipelines", {**body, "environments": environments})
        client.call("POST", "/v1/pipelines", {**body, "env_named": [None]})


def test_a_request_without_names_is_filtered(sh: Shell) -> None:
    sh.ok("gq")
    with DaemonConnection(str(sh.home / "run" / "api.sock")) as client:
        spec = {"argv": ["/bin/sh", "-c", "env > all"], "env": {"PATH": "/bin", **SECRET}, "work_dir": str(sh.work)}
        answer = client.call("POST", "/v1/jobs", {"spec": spec})
        assert answer["env_excluded"] == sorted(SECRET)
        sh.ok("gwait", answer["job"]["id"])
        assert "hush" not in (sh.work / "all").read_text()
        assert json.loads(sh.ok("gq", "-a", "--json"))["jobs"]
