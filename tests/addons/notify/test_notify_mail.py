"""Mail through a mail program and a mail server of the test."""

from __future__ import annotations

import os
import pwd
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from receivers import MailReceiver

from gpusched.addons.notify import mail
from gpusched.addons.notify.attempt import send, understands
from gpusched.addons.notify.targets import read_targets
from gpusched.addons.notify.terminals import Unreached
from gpusched.model.rules import MailServer

OWN_NAME = pwd.getpwuid(os.geteuid()).pw_name


@pytest.fixture
def receiver() -> Iterator[MailReceiver]:
    found = MailReceiver()
    yield found
    found.close()


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "sendmail"
    path.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/args\ncat > {tmp_path}/mail\n')
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(("url", "to"), [("sendmail:", OWN_NAME), ("sendmail:a@lab.org", "a@lab.org")])
def test_the_mail_program_gets_the_recipient_and_nothing_to_interpret(
    tmp_path: Path, program: str, url: str, to: str
) -> None:
    mail.send_mail(url, "a\nBcc: eve", "one\x1b\n.\ntwo", (str(tmp_path / "none"), program))
    heads, _, body = (tmp_path / "mail").read_text().partition("\n\n")
    assert "Subject: a\\nBcc: eve" in heads.splitlines()
    assert f"To: {to}" in heads.splitlines()
    assert body == "one\\x1b\n.\ntwo\n"
    assert (tmp_path / "args").read_text() == f"-i -- {to}\n"


def test_a_failing_mail_program_is_retried_and_a_missing_one_is_not(tmp_path: Path) -> None:
    program = tmp_path / "sendmail"
    program.write_text("#!/bin/sh\necho 'no route' >&2\nexit 75\n")
    program.chmod(0o755)
    with pytest.raises(Unreached, match="code 75: no route") as caught:
        mail.send_mail("sendmail:", "a", "b", (str(program),))
    assert not caught.value.is_final
    with pytest.raises(Unreached, match="there is no ") as caught:
        mail.send_mail("sendmail:", "a", "b", (str(tmp_path / "gone"),))
    assert caught.value.is_final


def test_a_mail_server_gets_one_message_for_the_recipient(receiver: MailReceiver) -> None:
    url = f"smtp://127.0.0.1:{receiver.port}?from=gpu@lab.org&to=bob%2Bx@lab.org"
    result = send(url, "a\nBcc: eve", "epoch 1 \x1b[2J\nälter")
    assert (result.is_told, result.error) == (True, "")
    [(to, message)] = receiver.mails
    assert to == ["bob+x@lab.org"]
    assert (message["From"], message["To"], message["Bcc"]) == ("gpu@lab.org", "bob+x@lab.org", None)
    assert message["Subject"] == "a\\nBcc: eve"
    assert message.get_content().splitlines() == ["epoch 1 \\x1b[2J", "älter"]


def test_a_password_is_sent_only_over_an_encrypted_connection(receiver: MailReceiver) -> None:
    result = send(f"smtp://alice:5ecret@127.0.0.1:{receiver.port}?to=a@lab.org", "t", "b")
    assert (result.is_told, result.is_final) == (False, False)
    assert result.error.startswith(
        "cannot mail through 127.0.0.1: it offers no encryption, so the password was not sent"
    )
    assert receiver.mails == []


def answering(*answers: bytes) -> str:
    """Address of a server that gives these answers, one to each line, whatever it is told."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as lines:
            for answer in answers:
                connection.sendall(answer + b"\r\n")
                lines.readline()
        listener.close()

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("answers", "error", "is_final"),
    [
        ([b"220 x", b"250 x", b"250 x", b"550 no such user"], "refuses the recipient: 550 no such user", True),
        ([b"220 x", b"250 x", b"250 x", b"450 come again"], "refuses the recipient: 450 come again", False),
        ([b"554 go away"], "the mail server says: 554 go away", False),
        ([b"220 x", b"250 x", b"553 not a@lab.org"], "the mail server says: 553 not ***", False),
        ([b"nonsense"], "what answers at 127.0.0.1 is not a mail server", False),
        ([], "cannot mail through 127.0.0.1", False),
    ],
)
def test_what_a_mail_server_refuses_is_told_without_secrets(answers: list[bytes], error: str, is_final: bool) -> None:
    result = send(f"smtp://{answering(*answers)}?from=a@lab.org&to=b@lab.org", "t", "b")
    assert not result.is_told
    assert error in result.error
    assert result.is_final is is_final


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("smtp://smtp.lab.org", None),
        ("smtps://me:p%40ss@smtp.lab.org:4465/?from=a@b.c&to=d@e.f", None),
        ("smtp://[::1]:25?to=a@b.c", None),
        ("smtp://?to=a@b.c", "names no mail server"),
        ("smtp://h/path", "names no mail server"),
        ("smtp://h:port", "is not an address such as"),
        ("smtp://h:99999", "is not an address such as"),
        ("smtp://[::1", "is not an address such as"),
        ("smtp://h?to", "is not an address such as"),
        ("smtp://h?cc=a@b.c", "has no option 'cc'"),
        ("smtp://me@h", "has a user without a password"),
    ],
)
def test_an_address_of_a_mail_server_is_checked(url: str, problem: str | None) -> None:
    found = mail.problem_of_server(url)
    assert (found is None) if problem is None else (found or "").startswith(problem)
    assert understands(url) is (problem is None)


def test_a_server_without_a_recipient_is_no_target() -> None:
    result = send("smtp://127.0.0.1:9", "t", "b")
    assert (result.is_final, result.error) == (
        True,
        "its address names no recipient, as in smtp://smtp.lab.org?to=alice@lab.org",
    )


@pytest.mark.parametrize(
    ("own", "site", "program", "url"),
    [
        ("smtp://own.lab.org", "smtp://site.lab.org", True, "smtp://own.lab.org?to=a@lab.org"),
        (None, "smtp://site.lab.org?from=g@lab.org", True, "smtp://site.lab.org?from=g@lab.org&to=a@lab.org"),
        (None, "sendmail:", False, "sendmail:a@lab.org"),
        (None, None, True, "sendmail:a@lab.org"),
        (None, None, False, None),
    ],
)
@pytest.mark.parametrize("has_file", [True, False])
def test_mail_goes_by_the_users_way_then_the_sites_then_the_machines(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: str | None,
    site: str | None,
    program: bool,
    url: str | None,
    has_file: bool,
) -> None:
    monkeypatch.setattr(
        "gpusched.addons.notify.targets.mail_program", lambda: "/usr/sbin/sendmail" if program else None
    )
    file = tmp_path / "notify.toml"
    if has_file or own:
        file.write_text("" if own is None else f"mail = '{own}'\n")
    found = read_targets(str(file), site).named("a@lab.org")
    assert (None if found is None else found.url) == url


@pytest.mark.parametrize(
    ("value", "is_admitted"),
    [
        ("sendmail:", True),
        ("smtp://smtp.lab.org?from=gpu@lab.org", True),
        ("mailtos://smtp.lab.org", True),
        ("smtp://me:pass@smtp.lab.org", False),
        ("sendmail:a@b.c", False),
        ("ntfy://topic", False),
        ("smtp.lab.org", False),
        ("smtp://", False),
        ("smtp://a b", False),
    ],
)
def test_the_sites_mail_server_has_no_password(value: str, is_admitted: bool) -> None:
    assert MailServer().admits(value) is is_admitted
