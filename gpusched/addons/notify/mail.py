"""Mail without a library of services: through the machine's mail program, or to a mail server by SMTP.

    sendmail:                       the local user, through /usr/sbin/sendmail
    sendmail:alice@lab.org          that address, likewise
    smtp://smtp.lab.org?to=alice@lab.org
    smtps://alice:password@smtp.lab.org?from=gpu@lab.org&to=alice@lab.org

Runs as the user, in a separate process with a deadline.
"""

from __future__ import annotations

import os
import pwd
import subprocess
from urllib.parse import SplitResult, parse_qs, quote, unquote, urlsplit

from gpusched.addons.notify.terminals import MAIL, Unreached, lines_of
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    import smtplib

SENDMAIL = ("/usr/sbin/sendmail", "/usr/lib/sendmail")
SMTP = ("smtp://", "smtps://")
_KNOWN = frozenset({"from", "to"})


def is_mail(url: str) -> bool:
    """Whether this module sends to the address."""
    return url.startswith((MAIL, *SMTP))


def with_recipient(server: str, to: str) -> str:
    """The address of a mail server with one of a recipient."""
    if server == MAIL:
        return MAIL + to
    return f"{server}{'&' if '?' in server else '?'}to={quote(to, safe='@')}"


def mail_program(programs: tuple[str, ...] = SENDMAIL) -> str | None:
    """The machine's mail program; None if there is none."""
    return next((path for path in programs if os.access(path, os.X_OK)), None)


def problem_of_server(url: str) -> str | None:
    """What is wrong with an smtp:// or smtps:// address, without repeating it; None if nothing is."""
    try:
        parts, port = urlsplit(url), urlsplit(url).port
        options = parse_qs(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        return "is not an address such as smtp://smtp.lab.org?from=gpu@lab.org"
    if not parts.hostname or port == 0 or parts.path not in ("", "/"):
        return "names no mail server, as in smtp://smtp.lab.org?from=gpu@lab.org"
    if unknown := sorted(options.keys() - _KNOWN):
        return f"has no option {printable(unknown[0], 40)!r}; known are: from, to"
    if "@" in parts.netloc and parts.password is None:
        return "has a user without a password; write smtps://USER:PASSWORD@SERVER"
    return None


def send_mail(url: str, title: str, body: str, programs: tuple[str, ...] = SENDMAIL) -> None:
    """Send mail to the address. Raises: Unreached."""
    if url.startswith(MAIL):
        _hand_to_program(url[len(MAIL) :], title, body, programs)
    else:
        _hand_to_server(url, title, body)


def _hand_to_program(to: str, title: str, body: str, programs: tuple[str, ...]) -> None:
    program = mail_program(programs)
    if program is None:
        raise Unreached(f"there is no {programs[0]} on this machine", is_final=True)
    to = to or _own_name()
    heads = (
        f"To: {to}",
        f"Subject: {printable(title, 200)}",
        "Auto-Submitted: auto-generated",
        "MIME-Version: 1.0",
        "Content-Type: text/plain; charset=utf-8",
        "Content-Transfer-Encoding: 8bit",
    )
    mail = "\n".join((*heads, "", lines_of(body), ""))
    done = subprocess.run([program, "-i", "--", to], input=mail.encode(), capture_output=True, check=False, cwd="/")
    if done.returncode:
        said = printable(done.stderr.decode("utf-8", "replace").strip(), 200)
        raise Unreached(f"{program} ended with code {done.returncode}: {said}", is_final=False)


def _hand_to_server(url: str, title: str, body: str) -> None:
    import smtplib  # with ssl and email, loaded by the child that needs them
    from email.message import EmailMessage

    if (problem := problem_of_server(url)) is not None:
        raise Unreached(f"its address {problem}", is_final=True)
    parts = urlsplit(url)
    options = parse_qs(parts.query)
    if "to" not in options:
        raise Unreached("its address names no recipient, as in smtp://smtp.lab.org?to=alice@lab.org", is_final=True)
    sender = options.get("from", [f"{_own_name()}@{os.uname().nodename}"])[0]
    try:
        mail = EmailMessage()
        mail["From"], mail["To"] = sender, ", ".join(options["to"])
        mail["Subject"], mail["Auto-Submitted"] = printable(title, 200), "auto-generated"
        mail.set_content(lines_of(body) + "\n")
        with _session(parts) as server:
            server.send_message(mail)
    except smtplib.SMTPRecipientsRefused as error:
        codes = {code for code, _ in error.recipients.values()}
        said = "; ".join(_said(code, text) for code, text in error.recipients.values())
        raise Unreached(f"the mail server refuses the recipient: {said}", is_final=min(codes) >= 500) from None
    except smtplib.SMTPResponseException as error:
        if error.smtp_code < 0:
            raise Unreached(f"what answers at {parts.hostname} is not a mail server", is_final=False) from None
        raise Unreached(f"the mail server says: {_said(error.smtp_code, error.smtp_error)}", is_final=False) from None
    except (OSError, ValueError) as error:
        # Among them those of ssl and smtplib.
        text = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise Unreached(f"cannot mail through {parts.hostname}: {printable(text, 200)}", is_final=False) from None


def _session(parts: SplitResult) -> smtplib.SMTP:
    """A session with the server, encrypted if it can be, and logged in if the address has a password."""
    import smtplib
    import ssl

    context = ssl.create_default_context()
    has_password = parts.password is not None
    server: smtplib.SMTP
    if parts.scheme == "smtps":
        server = smtplib.SMTP_SSL(parts.hostname or "", parts.port or 465, context=context)
    else:
        if not has_password:
            # As between mail servers: better with a certificate of unknown origin than in the clear.
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        server = smtplib.SMTP(parts.hostname or "", parts.port or (587 if has_password else 25))
        try:
            server.ehlo_or_helo_if_needed()
            if server.has_extn("starttls"):
                server.starttls(context=context)
            elif has_password:
                raise ValueError("it offers no encryption, so the password was not sent; use smtps:// or another port")
        except BaseException:
            server.close()
            raise
    if has_password:
        server.login(unquote(parts.username or ""), unquote(parts.password or ""))
    return server


def _said(code: int, text: bytes | str) -> str:
    words = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
    return printable(f"{code} {' '.join(words.split())}", 200)


def _own_name() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name
