"""`gctl export` and `gctl import`: accounts, queues, QOS and limits of users as one TOML text."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Mapping, Sequence

from gpusched.cli import output
from gpusched.cli.setting_changes import FileChange, check_unused
from gpusched.client import DaemonConnection, connect
from gpusched.config.document import KeyChange, document_of
from gpusched.config.edit import written, written_key
from gpusched.config.file import ConfigFile
from gpusched.config.load import parse_text, settings_in
from gpusched.config.table_changes import Document
from gpusched.errors import Refused, UsageError
from gpusched.model.queue_settings import EVERYBODY
from gpusched.model.settings import Settings
from gpusched.model.units import printable
from gpusched.paths import MAX_TEXT, read_at_most

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.cli.parse import Values

SECTIONS = ("account", "queue", "qos", "user")
_EXAMPLE = "for example: gctl export > lab.toml; gctl import lab.toml --dry-run"


def export(_: str, words: Sequence[str], values: Values) -> int:
    """Print the accounts, queues, QOS and limits in force."""
    output.no_operands(words, _EXAMPLE)
    with connect() as client:
        file = ConfigFile(client.call("GET", "/v1/status")["daemon"]["config"])
        document = document_of(settings_in(file.text(file.read()), file.path))
        document = {section: dict(document[section]) for section in SECTIONS if section in document}
        _take_in_members(client, document)
        limits = [one for one in client.call("GET", "/v1/limits")["limits"] if one["set_by"] is not None]
    if values.get("json"):
        output.print_json({**document, "limits": limits})
    else:
        sys.stdout.write(exported(document, limits))
    return 0


def exported(document: Mapping[str, Any], limits: Sequence[Mapping[str, Any]]) -> str:
    """The text of an export; dated limits are the commands that set them, as comments."""
    lines = ["# Accounts, queues, QOS and limits of users, by: gctl export. Put in force with: gctl import FILE"]
    for section, tables in document.items():
        for name, table in tables.items():
            lines += ["", f"[{section}.{written_key(name)}]"]
            lines += [f"{written_key(key)} = {written(_plain(key, value))}" for key, value in table.items()]
    if limits:
        lines += ["", "# Limits that the daemon keeps itself are not imported; they were set by:"]
    for one in limits:
        words = ["gctl", "limit", "user", one["user"]]
        words += [f"{key}={one[key]:g}" for key in ("max_gpus", "max_jobs") if one[key] is not None]
        words += [f"account={one['account']}"] if one["account"] else []
        if one["until_at"] is not None:
            words += ["--until", time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(one["until_at"]))]
        words += ["-m", one["message"]] if one["message"] else []
        lines.append(f"#     {printable(shlex.join(words))}")
    return "\n".join(lines) + "\n"


def _plain(key: str, value: Any) -> Any:
    """Members as most people write them: a list while each has one share."""
    if key != "users" or not isinstance(value, Mapping) or any(shares != 1 for shares in value.values()):
        return value
    return EVERYBODY if list(value) == [EVERYBODY] else list(value)


def _take_in_members(client: DaemonConnection, document: dict[str, Any]) -> None:
    """Members as they are in force: coordinators may have added some and removed others."""
    for row in client.call("GET", "/v1/accounts")["accounts"]:
        table = document.get("account", {}).get(row["account"])
        if row["user"] is not None or table is None or row["users"] is None:
            continue
        known = table.get("users", {})
        if known and sorted(known) != sorted(row["users"]):
            table["users"] = {name: known.get(name, 1) for name in sorted(row["users"])}


def import_from(_: str, words: Sequence[str], values: Values) -> int:
    """Make the accounts, queues, QOS and limits of users those of a file; `-` is standard input."""
    if len(words) != 1:
        raise UsageError("import needs one file", _EXAMPLE)
    name = "standard input" if words[0] == "-" else words[0]
    wanted = _read(words[0], name)

    with connect() as client:

        def made(document: Document, _settings: Settings) -> Sequence[KeyChange]:
            changes = []
            for section, tables in wanted.items():
                known = document.get(section, {})
                gone = [one for one in known if one not in tables]
                for one in gone:
                    if section != "user":
                        check_unused(client, section, one)
                changes += [KeyChange((section, one), None) for one in gone]
                changes += [
                    KeyChange((section, one), table) for one, table in tables.items() if known.get(one) != table
                ]
            return changes

        change = FileChange(client, made, values, shlex.join(["gctl", "import", *words]))
        return change.carry_out(f"imported {printable(name)}")


def _read(path: str, name: str) -> dict[str, Any]:
    """The sections of an export. Raises: UsageError, Refused."""
    try:
        if path == "-":
            content = read_at_most(sys.stdin.buffer, MAX_TEXT, name, _EXAMPLE)
        else:
            with open(path, "rb") as file:
                content = read_at_most(file, MAX_TEXT, printable(name), _EXAMPLE)
    except OSError as error:
        raise Refused(f"{printable(name)} cannot be read: {error.strerror}", _EXAMPLE) from None
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise UsageError(f"{printable(name)} is not UTF-8 text", _EXAMPLE) from None
    try:
        document = parse_text(text)
    except ValueError as error:
        raise UsageError(f"{printable(name)} is not TOML: {printable(str(error))}", _EXAMPLE) from None
    flat = [section for section in SECTIONS if not isinstance(document.get(section, {}), dict)]
    odd = [*flat, *(section for section in document if section not in SECTIONS)]
    if odd:
        raise UsageError(
            f"{printable(name)} has [{printable(odd[0], 40)}]; an import has {', '.join(SECTIONS)} alone",
            "change other sections in the config file",
        )
    if not any(document.values()):
        raise Refused(f"{printable(name)} has nothing to import", _EXAMPLE)
    return dict(document)
