"""Alerts from a real daemon through real senders to receivers on this machine."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import Daemon
from receivers import MailReceiver, WebReceiver, silence
from support import wait_until

from gpusched.daemon.failures import STEPS
from gpusched.extras import install_command

QUICK = "[alert]\nbackoff_s = 0.05\nbackoff_max_s = 0.2\ntimeout_s = 60\n"


@pytest.fixture
def web() -> Iterator[WebReceiver]:
    receiver = WebReceiver()
    yield receiver
    receiver.close()


@pytest.fixture
def mail() -> Iterator[MailReceiver]:
    receiver = MailReceiver()
    yield receiver
    receiver.close()


def targets(daemon: Daemon, text: str) -> None:
    """Write the user's notify.toml."""
    file = daemon.home / "notify.toml"
    file.write_text(text)
    file.chmod(0o600)


def to(web: WebReceiver, name: str = "hook", extra: str = "") -> str:
    return f'[target.{name}]\nurl = "{web.url()}"\n{extra}\n'


def story(daemon: Daemon, job_id: str) -> list[str]:
    return [event["text"] for event in daemon.job(job_id)["events"]]


def doctor(daemon: Daemon) -> dict[str, object]:
    checks = daemon.call("GET", "/v1/doctor")["checks"]
    return next(check for check in checks if check["check"] == "alerts")


def sender_of(daemon: Daemon) -> int:
    """The process that sends; there is one."""
    found: list[int] = []

    def look() -> bool:
        assert daemon.process is not None
        found[:] = [pid for pid in children(daemon.process.pid) if b"notify.sender" in command_of(pid)]
        return bool(found)

    wait_until(look, what="a sender")
    return found[0]


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def command_of(pid: int) -> bytes:
    """Its name and command line: one that was forked has only the first."""
    try:
        return b"".join(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("comm", "cmdline"))
    except OSError:
        return b""


def test_start_and_end_of_a_job_are_sent(make_daemon: Callable[..., Daemon], web: WebReceiver) -> None:
    daemon = make_daemon(config=QUICK)
    targets(daemon, to(web))
    job = daemon.submit("true", name="train", notify=["begin", "end"])
    wait_until(lambda: len(web.messages) == 2, what="two messages")
    assert web.titles == [f"gpusched: job {job} (train) has started", f"gpusched: job {job} (train): COMPLETED"]
    assert "COMPLETED: exit code 0" in web.messages[1]["message"]
    assert str(daemon.home) in web.messages[1]["message"]
    wait_until(lambda: "sent end to hook" in story(daemon, job), what="the story")
    assert "sent begin to hook" in story(daemon, job)


def test_a_failure_matching_two_events_is_sent_once(make_daemon: Callable[..., Daemon], web: WebReceiver) -> None:
    daemon = make_daemon(config=QUICK)
    ends = WebReceiver()
    targets(daemon, to(web) + f'[target.ends]\nurl = "{ends.url()}"\non = ["end"]\n')
    job = daemon.submit(
        "sh", "-c", "exit 3", name="x", notify=["end", "fail", "retry"], retries=1, backoff_s=0, argv=["false"]
    )
    wait_until(lambda: len(web.messages) == 2 and len(ends.messages) == 1, what="messages")
    # Each try is a process of its own.
    assert sorted(web.titles) == [f"gpusched: job {job} (x) will be retried", f"gpusched: job {job} (x): FAILED"]
    assert ends.titles == [f"gpusched: job {job} (x): FAILED"]
    ends.close()


def test_mail_goes_to_the_address_of_the_job(make_daemon: Callable[..., Daemon], mail: MailReceiver) -> None:
    daemon = make_daemon(config=QUICK)
    targets(daemon, f'mail = "mailto://127.0.0.1:{mail.port}?from=gpu@lab.example&mode=insecure"\n')
    daemon.submit("true", name="train", notify=["end"], notify_to=["alice@lab.example"])
    wait_until(lambda: bool(mail.mails), what="a mail")
    addressees, message = mail.mails[0]
    assert addressees == ["alice@lab.example"]
    assert "COMPLETED" in message["Subject"]
    assert message.get_content_type() == "text/plain"
    assert message.get_content().splitlines()[:2] == ["COMPLETED: exit code 0", ""]


def test_mail_has_one_subject_and_no_markup_for_any_job_name(
    make_daemon: Callable[..., Daemon], mail: MailReceiver
) -> None:
    daemon = make_daemon(config=QUICK)
    server = f'mail = "mailto://127.0.0.1:{mail.port}?from=gpu@lab.example&mode=insecure"\n'
    targets(daemon, server + '[template]\nbody = "{name}"\n')
    name = "<b>x</b>\r\nBcc: eve@lab.example\n\n& bye"
    daemon.submit("true", name=name, notify=["end"], notify_to=["alice@lab.example"])
    wait_until(lambda: bool(mail.mails), what="a mail")
    addressees, message = mail.mails[0]
    assert addressees == ["alice@lab.example"]
    assert message["Bcc"] is None
    assert "<b>x</b> Bcc: eve@lab.example & bye" in message["Subject"].replace("\n", "")
    assert message.get_content_type() == "text/plain"
    assert message.get_content().split() == name.split()


def test_templates_and_events_of_a_target_are_honoured(make_daemon: Callable[..., Daemon], web: WebReceiver) -> None:
    daemon = make_daemon(config=QUICK)
    targets(daemon, to(web, extra='on = ["fail"]\ntitle = "{name}!"\nbody = "{state} {exit_code} {signal} {{x}}"'))
    daemon.submit("true", name="good", notify=["all"])
    daemon.submit("false", name="bad", notify=["all"])
    wait_until(lambda: bool(web.messages), what="a message")
    assert (web.messages[0]["title"], web.messages[0]["message"]) == ("bad!", "FAILED 1 - {x}")
    wait_until(lambda: doctor(daemon)["text"] == "none to be sent", what="an empty outbox")
    assert len(web.messages) == 1


def test_a_service_that_fails_twice_receives_the_third_attempt(
    make_daemon: Callable[..., Daemon], web: WebReceiver
) -> None:
    daemon = make_daemon(config=QUICK)
    targets(daemon, to(web))
    web.codes = [500, 500]
    job = daemon.submit("true", notify=["end"])
    wait_until(lambda: bool(web.messages), what="a message")
    assert web.refused == 2
    wait_until(lambda: "sent end to hook, at attempt 3" in story(daemon, job), what="the story")
    failed = [text for text in story(daemon, job) if "could not send end to hook yet" in text]
    assert len(failed) == 1
    assert "500" in failed[0]
    assert doctor(daemon)["level"] == "ok"


def test_a_hanging_target_is_reported_and_delays_neither_jobs_nor_other_targets(
    make_daemon: Callable[..., Daemon], web: WebReceiver
) -> None:
    daemon = make_daemon(config=QUICK.replace("timeout_s = 60", "timeout_s = 2"))
    with silence() as port:
        targets(daemon, to(web) + f'[target.hangs]\nurl = "json://127.0.0.1:{port}/hush-5ecret"\n')
        first = daemon.submit("true", notify=["end"])
        wait_until(lambda: len(web.messages) == 1, what="the good target to be told")
        second = daemon.submit("true", notify=["end"])
        assert daemon.wait(second)[0]["state"] == "COMPLETED"
        wait_until(lambda: any(" to hangs" in text for text in story(daemon, first)), what="the story")
        wait_until(lambda: len(web.messages) == 2, what="the good target to be told again")
        check = doctor(daemon)
        assert check["level"] == "warn"
        assert check["ok"]
        assert "hangs: no answer within 2 s" in str(check["text"])


def test_secrets_appear_in_no_log_history_or_answer(make_daemon: Callable[..., Daemon], web: WebReceiver) -> None:
    daemon = make_daemon(config=QUICK + "give_up_s = 0\n[daemon]\nlog_level = 'debug'\n")
    targets(daemon, to(web) + '[target.gone]\nurl = "json://us3r:pa55@127.0.0.1:9/gone-5ecret?x=query-5ecret"\n')
    web.codes = [500]
    job = daemon.submit("true", notify=["end"])
    wait_until(lambda: sum("could not send" in text for text in story(daemon, job)) == 2, what="the story")
    said = json.dumps([daemon.job(job), daemon.call("GET", "/v1/doctor"), daemon.call("GET", "/v1/status")])
    for file in (daemon.home / "log" / "gpuschedd.log", daemon.home / "daemon.out"):
        said += file.read_text()
    assert "5ecret" not in said
    assert "pa55" not in said


@pytest.mark.parametrize("victim", ["sender", "both", pytest.param("daemon", marks=pytest.mark.nightly)])
def test_a_kill_between_commit_and_sending_loses_and_doubles_nothing(
    make_daemon: Callable[..., Daemon], web: WebReceiver, victim: str
) -> None:
    daemon = make_daemon(config=QUICK)
    targets(daemon, to(web))
    web.hold.clear()
    job = daemon.submit("true", name="x", notify=["end"])
    wait_until(lambda: web.waiting == 1, what="the sender to be in the middle of it")
    sender = sender_of(daemon)
    if victim != "sender":
        daemon.kill()
    if victim != "daemon":
        os.kill(sender, signal.SIGKILL)
        # What was under way is ended too: its message has not been taken.
        web.codes = [500]
    web.hold.set()
    if victim != "sender":
        daemon.start()
    wait_until(lambda: "sent end to hook" in story(daemon, job), what="the story")
    second = daemon.submit("true", name="y", notify=["end"])
    wait_until(lambda: "sent end to hook" in story(daemon, second), what="the second story")
    assert web.titles == [f"gpusched: job {job} (x): COMPLETED", f"gpusched: job {second} (y): COMPLETED"]


def test_a_daemon_killed_before_the_commit_sends_the_end_once(
    make_daemon: Callable[..., Daemon], web: WebReceiver
) -> None:
    daemon = make_daemon(start=False, config=QUICK)
    targets(daemon, to(web))
    # The first commit is that of the submission, the second one that of the end.
    daemon.start(GPUSCHED_CRASH_AT="commit:2")
    daemon.submit("true", name="x", notify=["end"])
    daemon.reap()
    assert web.messages == []
    daemon.start()
    wait_until(lambda: bool(web.messages), what="a message")
    daemon.wait("1")
    wait_until(lambda: "sent end to hook" in story(daemon, "1"), what="the story")
    assert len(web.messages) == 1


@pytest.mark.parametrize(
    ("step", "how"),
    [
        # By turns, so that each step and each way is tried with every change.
        pytest.param(step, how, marks=pytest.mark.nightly if (number + bool(how)) % 2 else ())
        for number, step in enumerate(STEPS[STEPS.index("reply") :])
        for how in ("", ":raise")
    ],
)
def test_an_end_is_sent_once_when_the_daemon_dies_or_fails_after_the_commit(
    make_daemon: Callable[..., Daemon], web: WebReceiver, step: str, how: str
) -> None:
    daemon = make_daemon(start=False, config=QUICK)
    targets(daemon, to(web))
    daemon.start(GPUSCHED_CRASH_AT=f"commit:2,{step}{how}")
    job = daemon.submit("true", name="x", notify=["end"])
    if not how:
        daemon.reap()
        daemon.start()
    wait_until(lambda: "sent end to hook" in story(daemon, job), what="the story")
    wait_until(lambda: doctor(daemon)["text"] == "none to be sent", what="an empty outbox")
    assert web.titles == [f"gpusched: job {job} (x): COMPLETED"]


def test_an_empty_queue_is_sent_when_the_last_job_ends(make_daemon: Callable[..., Daemon], web: WebReceiver) -> None:
    daemon = make_daemon(config=QUICK)
    targets(daemon, to(web))
    held = daemon.submit("true", name="last", hold=True)
    asked = daemon.submit("true", notify=["queue_empty"])
    daemon.wait(asked)
    daemon.kill()
    daemon.start()
    assert web.messages == []
    daemon.call("POST", "/v1/jobs/release", {"ids": [held]})
    wait_until(lambda: bool(web.messages), what="a message")
    assert f"the last was {held} (last), COMPLETED" in web.messages[0]["message"]


def test_limit_warnings_and_long_waits_are_sent_once_across_a_restart(
    make_daemon: Callable[..., Daemon], web: WebReceiver
) -> None:
    daemon = make_daemon(config=QUICK + "pending_s = 0.2\n[node]\ncpus = 1\n")
    targets(daemon, to(web))
    running = daemon.submit("sleep", "60", name="r", cpus=1, time_limit_s=10, notify=["time_limit_80"])
    waiting = daemon.submit("true", name="w", cpus=1, notify=["pending"])
    wait_until(lambda: "sent time_limit_80 to hook" in story(daemon, running), what="the limit to come near")
    wait_until(lambda: "sent pending to hook" in story(daemon, waiting), what="the wait to be told of")
    daemon.kill()
    daemon.start()
    daemon.wait(waiting)
    wait_until(lambda: doctor(daemon)["text"] == "none to be sent", what="an empty outbox")
    assert sorted(web.titles) == [
        f"gpusched: job {running} (r) is near its time limit",
        f"gpusched: job {waiting} (w) is still pending",
    ]


def test_a_job_without_a_target_says_so_in_its_history(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon(config=QUICK)
    job = daemon.submit("true", notify=["end"])
    wait_until(
        lambda: f"could not send end to any target: there is no {daemon.home}/notify.toml" in story(daemon, job),
        what="the story",
    )


def test_without_apprise_the_history_says_what_to_install(
    make_daemon: Callable[..., Daemon], web: WebReceiver, tmp_path: Path
) -> None:
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide" / "apprise.py").write_text("raise ImportError('not here')\n")
    daemon = make_daemon(start=False, config=QUICK)
    targets(daemon, to(web))
    daemon.start(PYTHONPATH=os.pathsep.join([str(tmp_path / "hide"), os.environ.get("PYTHONPATH", "")]))
    job = daemon.submit("true", notify=["end"])
    wait_until(lambda: any("apprise is not installed" in text for text in story(daemon, job)), what="the story")
    assert install_command("notify") in " ".join(story(daemon, job))


def test_the_admin_is_alerted_of_restarts_drains_and_lost_gpus(
    make_daemon: Callable[..., Daemon], web: WebReceiver, tmp_path: Path
) -> None:
    cards = tmp_path / "gpus.json"
    cards.write_text(json.dumps({"gpus": [{"name": "A100", "vram": "24GiB"}] * 2}))
    daemon = make_daemon(fake_gpus=str(cards), config=QUICK + "admin = ['ops']\n[daemon]\nidle_poll_s = 0.1\n")
    targets(daemon, to(web, "ops"))
    daemon.wait(daemon.submit("true"))
    daemon.kill()
    daemon.start()
    wait_until(lambda: any("daemon_restarted" in title for title in web.titles), what="the restart to be told of")
    daemon.call("POST", "/v1/drain", {"targets": ["1"], "message": "smells"})
    wait_until(lambda: any("gpu_drained" in title for title in web.titles), what="the drain to be told of")
    assert "was drained: smells" in web.messages[-1]["message"]
    cards.write_text(
        json.dumps({"gpus": [{"name": "A100", "vram": "24GiB", "lost": True}, {"name": "A100", "vram": "24GiB"}]})
    )
    wait_until(lambda: any("gpu_lost" in title for title in web.titles), what="the lost card to be told of")


def test_more_alerts_than_the_outbox_holds_are_dropped_and_counted(
    make_daemon: Callable[..., Daemon], web: WebReceiver
) -> None:
    daemon = make_daemon(config=QUICK + "outbox = 2\n")
    targets(daemon, to(web))
    web.hold.clear()
    ids = [daemon.submit("true", notify=["end"]) for _ in range(4)]
    daemon.wait(*ids)
    dropped = [job for job in ids if "end alert dropped: too many unsent alerts" in story(daemon, job)]
    assert len(dropped) == 2
    assert "2 alerts were dropped" in str(doctor(daemon)["text"])
    web.hold.set()
    wait_until(lambda: len(web.messages) == 2, what="the others to be told")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, 20))])
def test_random_kills_lose_no_alert_and_double_none_with_a_receipt(
    make_daemon: Callable[..., Daemon], web: WebReceiver, seed: int
) -> None:
    chance = random.Random(seed)
    daemon = make_daemon(config=QUICK)
    targets(daemon, to(web))
    ids: list[str] = []
    kills = 0
    for _ in range(4):
        ids += [daemon.submit("true", name="x", notify=["end"]) for _ in range(3)]
        enough = min(len(web.messages) + chance.randrange(3), len(ids))
        wait_until(lambda enough=enough: len(web.messages) >= enough, what="some messages")  # type: ignore[misc]
        assert daemon.process is not None
        senders = [pid for pid in children(daemon.process.pid) if b"notify.sender" in command_of(pid)]
        if chance.random() < 0.5 and senders:
            os.kill(senders[0], signal.SIGKILL)
        else:
            kills += 1
            daemon.kill()
            daemon.start()
    daemon.wait(*ids)
    wait_until(lambda: all("sent end to hook" in story(daemon, job) for job in ids), what="every story")
    assert {title.split()[2] for title in web.titles} == set(ids)
    # What a killed sender was sending comes to its end.
    assert len(web.titles) <= len(ids) + kills
