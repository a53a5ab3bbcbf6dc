"""A user's `notify.toml`: targets, their events and texts.

    mail = "smtp://smtp.lab.org?from=gpusched@lab.org"    # for --mail-user

    [target.phone]
    url = "ntfy://alice-gpus"
    on = ["fail", "time_limit_80"]

    [template.fail]
    title = "{name} broke"

The sending process reads it as the file's user; its addresses are secrets.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from string import Formatter
from typing import Any

from gpusched.addons.notify.mail import SMTP, mail_program, problem_of_server, with_recipient
from gpusched.addons.notify.terminals import BUILT_IN, MAIL
from gpusched.config.toml_lines import Key, lines_of
from gpusched.errors import Refused, UsageError
from gpusched.model.alert_events import ADMIN_EVENTS, EVENTS, FACTS, OWNER_EVENTS, parse_events
from gpusched.model.units import closest, printable
from gpusched.paths import MAX_TEXT, read_at_most

TITLES: Mapping[str, str] = {
    "begin": "job {job} ({name}) has started",
    "end": "job {job} ({name}): {state}",
    "fail": "job {job} ({name}): {state}",
    "retry": "job {job} ({name}) will be retried",
    "preempt": "job {job} ({name}) was preempted",
    "time_limit_80": "job {job} ({name}) is near its time limit",
    "held": "job {job} ({name}) is held",
    "pending": "job {job} ({name}) is still pending",
    "gpu_idle": "job {job} ({name}) leaves its GPUs idle",
    "vram_over": "job {job} ({name}) uses more GPU memory than it booked",
    "gpu_unbooked": "job {job} ({name}) uses a GPU that it did not book",
    "gpu_intruder": "job {job} ({name}) is not alone on its GPU",
    "node_unreachable": "the node of job {job} ({name}) does not answer",
    "efficiency": "job {job} ({name}) used little of what it held",
    "queue_empty": "all jobs of {user} have ended",
    "test": "a test",
    "budget": "budget of {account}",
    "gpu_foreign": "a foreign process on GPU {gpus} of {node}",
}
ADMIN_TITLE = "{event} on {node}"
TITLE_PREFIX = "gpusched: "

BODY = (
    "{message}\n\nnode {node}, GPUs {gpus}, started {start_at}, ran {elapsed} of {time_limit}\n"
    "directory {work_dir}\noutput {output}\n"
)
_ENDS = ("end", "fail", "efficiency")
PLAIN_BODY = "{message}\n"
_PLAIN = ("queue_empty", "pending", "test", "gpu_foreign", "budget")


def default_texts(event: str) -> tuple[str, str]:
    """Title and body for an event without a template."""
    title = TITLE_PREFIX + TITLES.get(event, ADMIN_TITLE)
    if event in _ENDS:
        return title, BODY + "{report}\n"
    return title, BODY if event in TITLES and event not in _PLAIN else PLAIN_BODY


def problem_of(template: str) -> str | None:
    """What is wrong with a template, as a sentence; None when it is valid."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError:
        return "has an unmatched brace; write {{ or }} for a literal brace"
    for _, name, form, conversion in parts:
        if name is None:
            continue
        if name not in FACTS:
            near = closest(name, FACTS)
            hint = f"did you mean {{{near}}}?" if near else "known are: " + ", ".join(FACTS)
            return f"uses {{{name[:40]}}}, which is not a fact; {hint}"
        if form or conversion:
            return f"formats {{{name}}}; only a name may be in braces"
    return None


def fill(template: str, facts: Mapping[str, str | float]) -> str:
    """Substitute facts for their names in the template; `-` for missing ones."""
    return template.format_map({name: _shown(name, facts.get(name)) for name in FACTS})


def _shown(name: str, value: str | float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        # Names and paths may hold bytes that are not text, which no message can carry.
        return value.encode("utf-8", "backslashreplace").decode()
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HINT = "see docs/howto/alerts.md, and try it with: gpusched notify test"
_TEXTS = ("title", "body")
_TARGET_KEYS = ("url", "on", *_TEXTS)
_KNOWN_EVENTS = (*EVENTS, *OWNER_EVENTS, *ADMIN_EVENTS)


@dataclass(frozen=True, slots=True)
class Target:
    """One way to reach the user."""

    name: str
    url: str
    """In apprise's form; secret."""
    on: frozenset[str] | None = None
    """Only these events; None means all."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """The target's own `title` and `body`."""

    def takes(self, words: tuple[str, ...] | list[str]) -> bool:
        """Whether it accepts an alert that counts as any of these."""
        return self.on is None or not self.on.isdisjoint(words)


@dataclass(frozen=True, slots=True)
class Targets:
    """Contents of the file."""

    file: str
    exists: bool = True
    targets: Mapping[str, Target] = field(default_factory=dict)
    templates: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By event; the texts for all events are under the empty name."""
    mail: str | None = None
    """Mail server for addresses named in a submission: the file's, the site's, or the machine's mail program."""

    def words_for(self, target: Target, event: str) -> tuple[str, str]:
        """The most specific templates of title and body."""
        title, body = default_texts(event)
        texts = {"title": title, "body": body, **self.templates.get("", {}), **self.templates.get(event, {})}
        texts.update(target.texts)
        return texts["title"], texts["body"]

    def named(self, name: str) -> Target | None:
        """A target by its name, or the mail server with this address; None when there is none."""
        if name in BUILT_IN:
            return Target(name, BUILT_IN[name])
        if name in self.targets or "@" not in name or self.mail is None:
            return self.targets.get(name)
        return Target(name, with_recipient(self.mail, name))

    def why_no_target(self, name: str = "") -> str:
        """Why there is no target of this name, or, without a name, no target at all."""
        if "@" in name:
            none = f"{self.file} has no mail server" if self.exists else f"there is no {self.file} with a mail server"
            return f"{none}, as in: mail = 'smtp://smtp.lab.org'"
        if not self.exists:
            return f"there is no {self.file}"
        if not name:
            return f"{self.file} names no target"
        return f"{self.file} has no target of this name"


class TargetsError(UsageError):
    """The file is unusable; `problems` has a sentence for each reason."""

    def __init__(self, problems: list[UsageError]) -> None:
        self.problems = problems
        more = f" (and {len(problems) - 1} more; see all with: gpusched config check)" if len(problems) > 1 else ""
        super().__init__(problems[0].message + more, problems[0].hint)


def read_targets(file: str, mail: str | None = None) -> Targets:
    """Read the file; empty when there is none.

    Args: mail: the site's mail server, for a file that names none. Raises: TargetsError with file and line.
    """
    mail = mail or (MAIL if mail_program() is not None else None)
    try:
        with open(file, "rb") as opened:
            content = read_at_most(opened, MAX_TEXT, file, f"see: ls -l {file}")
        text = content.decode("utf-8").replace("\r\n", "\n")
        document, lines = tomllib.loads(text), lines_of(text)
    except FileNotFoundError:
        return Targets(file, exists=False, mail=mail)
    except Refused as error:
        raise TargetsError([UsageError(error.message, error.hint)]) from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise TargetsError([UsageError(f"{file} cannot be read: {reason}", f"see: ls -l {file}")]) from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise TargetsError([UsageError(f"{file} is not valid TOML: {_without_text(error)}", HINT)]) from None
    return _Reader(file, lines).read(document, mail)


def is_open_to_others(file: str) -> bool:
    """Whether other users may read the file, which holds secrets."""
    try:
        return bool(os.stat(file).st_mode & (stat.S_IRGRP | stat.S_IROTH))
    except OSError:
        return False


def _without_text(error: Exception) -> str:
    """The parser's message, without the bytes that it quotes."""
    return "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)


class _Reader:
    """Collects targets, templates, and errors in them."""

    def __init__(self, file: str, lines: Mapping[Key, int]) -> None:
        self._file = file
        self._lines = lines
        self._problems: list[tuple[int, UsageError]] = []

    def read(self, document: dict[str, Any], mail: str | None) -> Targets:
        targets, templates = {}, {}
        for section, content in document.items():
            if section == "mail":
                if self._is_address(content, section):
                    mail = str(content)
            elif section == "target":
                targets = {target.name: target for target in self._read_targets(content)}
            elif section == "template":
                templates = self._read_templates(content)
            else:
                self._unknown(section, "it", ("mail", "target", "template"), section)
        if self._problems:
            raise TargetsError([error for _, error in sorted(self._problems, key=lambda problem: problem[0])])
        return Targets(self._file, True, targets, templates, mail)

    def _read_targets(self, content: Any) -> Iterator[Target]:
        if not isinstance(content, dict):
            self._refuse("target is a section; write [target.NAME] on a separate line", "target")
            return
        for name, table in content.items():
            key = ("target", name)
            if not isinstance(table, dict):
                self._refuse(f"target.{printable(name, 40)} is a table; write [target.NAME] before its keys", *key)
            elif not name or not name.isprintable() or set(name) & set(" ,@"):
                self._refuse(
                    f"{printable(name, 40)!r} is not a valid target name; write one word without , and @", *key
                )
            else:
                target = self._read_target(name, table)
                if target is not None:
                    yield target

    def _read_target(self, name: str, table: dict[str, Any]) -> Target | None:
        key = ("target", name)
        for word in table:
            if word not in _TARGET_KEYS:
                self._unknown(word, f"[target.{name}]", _TARGET_KEYS, *key, word)
        url = table.get("url")
        if url is None:
            self._refuse(f"target {name} has no url; write for example: url = 'ntfy://my-topic'", *key)
            return None
        if not self._is_address(url, *key, "url"):
            return None
        return Target(name, url, self._read_events(table, key), self._read_texts(table, key))

    def _read_events(self, table: dict[str, Any], key: Key) -> frozenset[str] | None:
        words = table.get("on")
        if words is None:
            return None
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            self._refuse(f"on of target {key[1]} must be a list of strings, such as ['fail', 'end']", *key, "on")
            return None
        found: set[str] = set()
        for word in words:
            if word in ADMIN_EVENTS or word in OWNER_EVENTS:
                found.add(word)
                continue
            try:
                found.update((*ADMIN_EVENTS, *OWNER_EVENTS) if word == "all" else (), parse_events(word))
            except ValueError as error:
                self._refuse(f"on of target {key[1]}: {error}", *key, "on")
        return frozenset(found)

    def _read_templates(self, content: Any) -> dict[str, dict[str, str]]:
        if not isinstance(content, dict):
            self._refuse("template is a section; write [template] or [template.fail] on a separate line", "template")
            return {}
        found = {"": self._read_texts(content, ("template",))}
        for event, table in content.items():
            if event in _TEXTS:
                continue
            if event not in _KNOWN_EVENTS:
                self._unknown(event, "[template]", (*_TEXTS, *_KNOWN_EVENTS), "template", event)
            elif not isinstance(table, dict):
                self._refuse(f"template.{event} is a table; write [template.{event}]", "template", event)
            else:
                for word in table.keys() - set(_TEXTS):
                    self._unknown(word, f"[template.{event}]", _TEXTS, "template", event, word)
                found[event] = self._read_texts(table, ("template", event))
        return found

    def _read_texts(self, table: dict[str, Any], key: Key) -> dict[str, str]:
        found = {}
        for word in _TEXTS:
            text = table.get(word)
            if text is None:
                continue
            problem = problem_of(text) if isinstance(text, str) else "must be a string"
            if problem is not None:
                self._refuse(f"{'.'.join((*key, word))} {problem}", *key, word)
            else:
                found[word] = text
        return found

    def _is_address(self, url: Any, *key: str) -> bool:
        scheme, mark, rest = url.partition("://") if isinstance(url, str) else ("", "", "")
        if isinstance(url, str) and url.startswith(SMTP):
            if (problem := problem_of_server(url)) is None:
                return True
            self._refuse(f"{'.'.join(key)} {problem}", *key)
            return False
        if url == MAIL or (mark and rest and scheme.isalnum()):
            return True
        # The value may be a secret that was written in another form: it is not repeated.
        self._refuse(f"{'.'.join(key)} is not an address such as ntfy://my-topic or smtp://...", *key)
        return False

    def _unknown(self, word: str, where: str, known: tuple[str, ...], *key: str) -> None:
        near = closest(word, known)
        hint = f"did you mean {near}?" if near else f"known are: {', '.join(known)}"
        self._refuse(f"{where} has no {printable(word, 40)}; {hint}", *key)

    def _refuse(self, text: str, *key: str) -> None:
        line = self._line(key)
        place = f"file {self._file}, line {line}" if line else f"file {self._file}"
        self._problems.append((line, UsageError(f"{place}: {text}", HINT)))

    def _line(self, key: Key) -> int:
        """Line of the key, else of its first item, else of its table; 0 when unknown."""
        for length in range(len(key), 0, -1):
            found = [line for known, line in self._lines.items() if known[:length] == key[:length]]
            if found:
                return min(found)
        return 0
