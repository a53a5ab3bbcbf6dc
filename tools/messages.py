"""Collect every sentence that the package can print: errors with their hints first, then all other text, by part."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "gpusched"

_INTRODUCTION = """# Messages

Every sentence that gpusched prints, collected from its source; `{name}` stands for a value. Errors come with the exit code and the
next command to type; below them, by part of the package, reasons, help texts and log lines. Read it as a list: one word has one
meaning, a sentence names the offending value, and nothing here needs reading twice.
"""

_SQL = re.compile(
    r"^\s*(SELECT|INSERT|UPDATE|DELETE|CREATE|ALTER|PRAGMA|DROP|BEGIN|ATTACH|WITH|VACUUM|REPLACE)\b|\bWHERE\b"
)
_WORDS = re.compile(r"[A-Za-z]{2,}[,;:.]? +[A-Za-z{(\"']")
_CODE = re.compile(r"^[\w.\-/ {}=:%]+$")
_NOT_READ = frozenset(
    {"compile", "split", "match", "search", "sub", "Struct", "CDLL", "execute", "strptime", "strftime"}
)


def text_of(node: ast.expr | None) -> str | None:
    """The text of a literal, with `{name}` for what is put in; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = []
        for value in node.values:
            if isinstance(value, ast.Constant):
                parts.append(str(value.value))
            elif isinstance(value, ast.FormattedValue):
                parts.append("{" + _name_of(value.value) + "}")
        return "".join(parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        if left is not None or right is not None:
            return (left or "{" + _name_of(node.left) + "}") + (right or "{" + _name_of(node.right) + "}")
    if isinstance(node, ast.IfExp):
        return " / ".join(filter(None, (text_of(node.body), text_of(node.orelse)))) or None
    return None


def _name_of(node: ast.expr) -> str:
    """What a reader would call the value: its last name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Call):
        return _name_of(node.args[0]) if node.args else _name_of(node.func)
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, (ast.Subscript, ast.Starred, ast.Await)):
        return _name_of(node.value)
    if isinstance(node, ast.BinOp):
        return _name_of(node.left)
    return "..."


def _error_classes() -> frozenset[str]:
    tree = ast.parse((PACKAGE / "errors.py").read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.ClassDef))


class _Collector(ast.NodeVisitor):
    def __init__(self, errors: frozenset[str]) -> None:
        self.error_names = errors
        self.errors: list[tuple[str, str, str]] = []
        self.texts: list[str] = []

    def visit_Call(self, node: ast.Call) -> None:
        name = _name_of(node.func)
        if name in self.error_names and node.args:
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            hint = node.args[1] if len(node.args) > 1 else keywords.get("hint")
            self.errors.append((name, text_of(node.args[0]) or "{" + _name_of(node.args[0]) + "}", text_of(hint) or ""))
            return
        if name in _NOT_READ:
            return
        self.generic_visit(node)

    def _body(self, node: ast.AST, body: list[ast.stmt]) -> None:
        """Everything but docstrings and the sentences under fields."""
        for statement in body:
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                self.visit(statement)

    def visit_Module(self, node: ast.Module) -> None:
        self._body(node, node.body)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._body(node, node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._body(node, node.body)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._body(node, node.body)

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def _text(self, node: ast.expr) -> None:
        text = text_of(node)
        if text is not None and _is_sentence(text):
            self.texts.append(text)

    def visit_Constant(self, node: ast.Constant) -> None:
        self._text(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._text(node)
        for value in node.values:
            if isinstance(value, ast.FormattedValue):
                self.visit(value.value)


def _is_sentence(text: str) -> bool:
    return bool(_WORDS.search(text)) and not _SQL.search(text) and "\x00" not in text


def _shown(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("`", "'").replace("<", "&lt;")


def _collected() -> Iterator[tuple[str, _Collector]]:
    errors = _error_classes()
    for path in sorted(PACKAGE.rglob("*.py")):
        collector = _Collector(errors)
        collector.visit(ast.parse(path.read_text(encoding="utf-8")))
        yield path.relative_to(PACKAGE).parts[0].removesuffix(".py"), collector


def messages_page() -> str:
    """docs/reference/messages.md."""
    errors: set[tuple[str, str, str]] = set()
    texts: dict[str, list[str]] = {}
    for part, collector in _collected():
        errors.update(collector.errors)
        texts.setdefault(part, []).extend(collector.texts)
    lines = [_INTRODUCTION, "## Errors", "", "| error | message | hint |", "|---|---|---|"]
    lines += [f"| {name} | {_shown(message)} | {_shown(hint)} |" for name, message, hint in sorted(errors)]
    for part, found in texts.items():
        if found:
            lines += ["", f"## {part}", ""]
            lines += [f"- {text}" for text in dict.fromkeys(map(_shown, found))]
    return "\n".join(lines) + "\n"
