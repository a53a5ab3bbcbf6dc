"""Alerts as users type them: options, Slurm's lines, the test message, what is said of a wrong file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from receivers import MailReceiver, WebReceiver, silence
from shell import Shell
from support import wait_until


@pytest.fixture
def web() -> Iterator[WebReceiver]:
    receiver = WebReceiver()
    yield receiver
    receiver.close()


def targets(shell: Shell, text: str) -> Path:
    file = shell.home / "notify.toml"
    file.write_text(text)
    file.chmod(0o600)
    return file


def alerting(shell: Shell, job: str) -> dict[str, list[str]]:
    return dict(json.loads(shell.ok("gshow", "--json", job))["jobs"][0]["spec"]["alerting"])


@pytest.mark.parametrize(
    ("words", "on", "to"),
    [
        (("--notify", "end,TIME_LIMIT_80"), ["end", "time_limit_80"], []),
        (("--notify=fail", "--notify=end", "--notify-to=phone,mail"), ["end", "fail"], ["phone", "mail"]),
        (("--mail-type=ALL",), ["begin", "end", "fail", "preempt", "retry"], []),
        (("--mail-type=END,REQUEUE", "--mail-user=a@b.org"), ["end", "preempt", "retry"], ["a@b.org"]),
    ],
)
def test_options_set_alert_events_and_targets(sh: Shell, words: tuple[str, ...], on: list[str], to: list[str]) -> None:
    job = sh.submit("--hold", *words, "--", "true")
    assert alerting(sh, job) == {"on": on, "targets": to}
    tells = next(line for line in sh.ok("gshow", job).splitlines() if line.startswith("Alerts:"))
    assert tells.split(maxsplit=1)[1] == ", ".join(on) + (f" to {', '.join(to)}" if to else "")
    sh.ok("gcancel", job)


def test_none_disables_alerts_and_a_variable_sets_the_default(sh: Shell) -> None:
    job = sh.submit("--hold", "--mail-type=NONE", "--", "true")
    assert json.loads(sh.ok("gshow", "--json", job))["jobs"][0]["spec"]["alerting"] is None
    other = sh.ok("gsub", "--parsable", "--hold", "--", "true", GSUB_NOTIFY="fail").strip()
    assert alerting(sh, other)["on"] == ["fail"]
    sh.ok("gcancel", job, other)


def test_a_user_without_targets_is_warned_and_the_output_is_unchanged(own: Shell) -> None:
    done = own.type("gsub", "--parsable", "--notify=end", "--", "true")
    assert (done.code, done.out) == (0, "1\n")
    assert done.err == (
        f"gsub: there is no {own.home}/notify.toml, so no alerts will be sent; create it as in docs/howto/alerts.md\n"
    )
    targets(own, '[target.x]\nurl = "json://127.0.0.1:9"\n')
    assert own.type("gsub", "--notify=end", "--", "true").err == ""
    assert own.type("gsub", "--", "true").err == ""


@pytest.mark.parametrize(
    ("file", "to", "says"),
    [
        ("", "", "no alerts will be sent: {file} names no target"),
        ('[target.x]\nurl = "json://h"\n', "x,y", "y will get no alerts: {file} has no target of this name"),
        ("", "a@b.org", "a@b.org will get no alerts: {file} has no mail server, as in: mail = 'smtp://smtp.lab.org'"),
        (
            '[target.x]\nurl = "json://h"\ntitle = "{nmae}"\n',
            "x",
            "no alerts will be sent until this is fixed: file {file}, line 3: target.x.title uses {{nmae}}, "
            "which is not a fact; did you mean {{name}}?",
        ),
    ],
)
def test_an_unusable_target_file_is_reported_at_submission(own: Shell, file: str, to: str, says: str) -> None:
    path = targets(own, file)
    words = ("--notify=end", f"--notify-to={to}") if to else ("--notify=end",)
    done = own.type("gsub", "--parsable", "--hold", *words, "--", "true")
    assert (done.code, done.out) == (0, "1\n")
    assert done.err == f"gsub: {says.format(file=path)}\n"
    changes = ("notify=end", f"notify-to={to}") if to else ("notify=end",)
    assert own.type("gctl", "update", "1", *changes).err == f"gctl: {says.format(file=path)}\n"


def test_alert_targets_can_be_updated_later(own: Shell) -> None:
    targets(own, '[target.phone]\nurl = "json://127.0.0.1:9"\n[target.desk]\nurl = "json://127.0.0.1:9"\n')
    own.ok("gsub", "--hold", "--", "true")
    refused = own.type("gctl", "update", "1", "notify-to=phone")
    assert refused.code == 1
    assert refused.err == (
        "gctl: error: phone is a target of job 1 without events to report\n"
        "gctl: hint: name the events: gctl update 1 notify=end notify-to=phone\n"
    )
    own.ok("gctl", "update", "1", "notify=FAIL,end", "notify-to=phone,desk")
    assert alerting(own, "1") == {"on": ["end", "fail"], "targets": ["phone", "desk"]}
    assert "notify=end,fail, notify_to=phone,desk by " in own.ok("gshow", "1")
    own.ok("gctl", "update", "1", "notify=begin")
    assert alerting(own, "1") == {"on": ["begin"], "targets": ["phone", "desk"]}
    own.ok("gctl", "update", "1", "notify-to=")
    assert alerting(own, "1") == {"on": ["begin"], "targets": []}
    for nobody in ("notify=", "notify=none"):
        own.ok("gctl", "update", "1", "notify=begin")
        own.ok("gctl", "update", "1", nobody)
        assert json.loads(own.ok("gshow", "--json", "1"))["jobs"][0]["spec"]["alerting"] is None
    for wrong, says in (("notify=ends", "'ends' is not an event"), ("notify-to=a b", "'a b' is neither")):
        done = own.type("gctl", "update", "1", wrong)
        assert (done.code, says in done.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--notify", "ends"), "--notify: 'ends' is not an event"),
        (("--mail-type=TIME_LIMIT_90",), "the nearest is time_limit_80"),
        (("--notify-to=a@b.org",), "a@b.org is a target of alerts, but no event is named"),
        (("--notify=end", "--notify-to=a b"), "'a b' is neither a target nor a mail address"),
        (("--notify=end", "--notify-to=a@b.c?to=d@e.f"), "'a@b.c?to=d@e.f' is neither a target nor a mail address"),
    ],
)
def test_invalid_alert_options_are_refused(sh: Shell, words: tuple[str, ...], says: str) -> None:
    done = sh.type("gsub", *words, "--", "true")
    assert done.code == 2
    assert says in done.err


def test_a_slurm_script_mails_its_user(own: Shell) -> None:
    mail = MailReceiver()
    targets(own, f'mail = "mailto://127.0.0.1:{mail.port}?from=gpu@lab.example&mode=insecure"\n')
    (own.work / "job.sh").write_text(
        "#!/bin/sh\n#SBATCH --mail-type=BEGIN,END\n#SBATCH --mail-user=alice@lab.example\ntrue\n"
    )
    own.submit("job.sh")
    wait_until(lambda: len(mail.mails) == 2, what="two mails")
    assert [to for to, _ in mail.mails] == [["alice@lab.example"]] * 2
    assert ["has started" in mail.mails[0][1]["Subject"], "COMPLETED" in mail.mails[1][1]["Subject"]] == [True, True]
    mail.close()


def test_the_test_message_reports_its_delivery(own: Shell, web: WebReceiver) -> None:
    with silence() as port:
        hangs = f'[target.hangs]\nurl = "json://127.0.0.1:{port}/hush-5ecret"\n'
        gone = '[target.gone]\nurl = "json://127.0.0.1:9/x-5ecret"\n'
        targets(own, f'[target.good]\nurl = "{web.url()}"\n{gone}')
        assert own.ok("gpusched", "notify", "test", "good") == "good: sent\n"
        assert web.titles == ["gpusched: a test"]
        both = own.type("gpusched", "notify", "test")
        # Only of one that never answers is it known that it takes longer than this.
        (own.home / "config.toml").write_text("[alert]\ntimeout_s = 1\n")
        targets(own, f'[target.good]\nurl = "{web.url()}"\n{gone}{hangs}')
        late = own.type("gpusched", "notify", "test", "hangs")
    assert (both.code, late.code) == (1, 1)
    good, refused = both.out.splitlines()
    assert good == "good: sent"
    assert refused.startswith("gone: not sent: ")
    assert late.out == "hangs: not sent: no answer within 1 s\n"
    assert "5ecret" not in both.out + both.err + late.out + late.err
    (own.home / "config.toml").unlink()
    web.codes = [500]
    document = json.loads(own.type("gpusched", "notify", "test", "good", "--json").out)
    assert (document["targets"][0]["target"], document["targets"][0]["told"]) == ("good", False)
    assert "500" in document["targets"][0]["error"]


def test_a_test_message_without_targets_fails_with_a_sentence(own: Shell, tmp_path: Path, web: WebReceiver) -> None:
    done = own.type("gpusched", "notify", "test")
    assert (done.code, done.err.splitlines()[0]) == (1, f"gpusched: error: there is no {own.home}/notify.toml")
    targets(own, f'[target.good]\nurl = "{web.url()}"\n')
    done = own.type("gpusched", "notify", "test", "god")
    assert (done.code, done.err.splitlines()[-1]) == (1, "gpusched: hint: targets are: good")
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide" / "apprise.py").write_text("raise ImportError('not here')\n")
    hidden = f"{tmp_path / 'hide'}:{own.env.get('PYTHONPATH', '')}"
    done = own.type("gpusched", "notify", "test", PYTHONPATH=hidden)
    assert done.code == 1
    assert "good: not sent: apprise is not installed; install it with: " in done.out


def test_config_check_and_doctor_read_the_file_and_config_show_hides_its_secrets(own: Shell, web: WebReceiver) -> None:
    file = targets(own, f'[target.good]\nurl = "{web.url()}"\ntitle = "{{nmae}}"\n')
    done = own.type("gpusched", "config", "check")
    assert done.code == 2
    said = f"file {file}, line 3: target.good.title uses {{nmae}}, which is not a fact; did you mean {{name}}?"
    assert said in done.err
    assert said in own.type("gpusched", "doctor").out
    targets(own, '[target.good]\nurl = "nosuchservice://5ecret"\n')
    done = own.type("gpusched", "config", "check")
    assert "no service understands the address nosuchservice://... of target good" in done.err
    targets(own, f'[target.good]\nurl = "{web.url()}"\n').chmod(0o644)
    done = own.type("gpusched", "config", "check")
    assert f"hint: chmod 600 {file}" in done.err
    file.chmod(0o600)
    own.ok("gpusched", "config", "check")
    assert "5ecret" not in own.ok("gpusched", "config", "show") + own.ok("gpusched", "config", "show", "--json")
