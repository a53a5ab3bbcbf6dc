"""The asynchronous client, made from the source of the synchronous one: the same methods, keywords and words.

A function is awaited if it goes through `link` or `self._link` (`call`, `run`, `sleep`, `close`), or calls one that is.
Every other function is imported. Text is inserted into the source, so comments and layout stay.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

SDK = Path(__file__).resolve().parents[1] / "gpusched" / "sdk"
_AWAITED_OF_LINK = frozenset({"call", "run", "sleep", "close"})
_ITERATED = frozenset({"logs"})
"""Methods that return a generator: here they are generators, so that no `await` comes before `async for`."""
_ENTERED = frozenset({"__enter__", "__exit__"})
_RENAMED = {
    "Client": "AsyncClient",
    "SubmittedJob": "AsyncSubmittedJob",
    "Link": "AsyncLink",
    "Iterator": "AsyncIterator",
}
_CLASSES = ("Client", "SubmittedJob")
_BOUND = ("_client_of", "_submitted")
"""Functions about the client itself, made again for its type."""

Function = ast.FunctionDef


class _Source:
    """The parsed module, and what in it is awaited."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self.functions: dict[str, list[Function]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                self.functions.setdefault(node.name, []).append(node)
        self.awaited: set[str] = set()
        while True:
            more = {name for name, found in self.functions.items() if any(map(self._is_awaited, found))} - _ITERATED
            if more == self.awaited:
                return
            self.awaited = more

    def _is_awaited(self, function: Function) -> bool:
        return any(self.awaits(call) for call in _own_nodes(function) if isinstance(call, ast.Call))

    def awaits(self, call: ast.Call) -> bool:
        """Whether a call goes through the link, or to a function that does."""
        called = call.func
        if isinstance(called, ast.Name):
            return called.id in self.awaited
        if not isinstance(called, ast.Attribute):
            return False
        of = ast.unparse(called.value)
        if of in ("link", "self._link"):
            return called.attr in _AWAITED_OF_LINK
        return of in ("self", "_client_of(self)") and called.attr in self.awaited

    def is_generator(self, name: str) -> bool:
        """Whether a function yields."""
        return any(
            isinstance(node, (ast.Yield, ast.YieldFrom))
            for one in self.functions.get(name, ())
            for node in _own_nodes(one)
        )


def _own_nodes(function: Function) -> list[ast.AST]:
    """What a function does itself: a lambda in it runs in another thread."""
    found: list[ast.AST] = []
    left: list[ast.AST] = list(function.body)
    while left:
        node = left.pop()
        found.append(node)
        left += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.Lambda)]
    return found


def async_client_module() -> str:
    """The module `gpusched.sdk.async_client`."""
    source = _Source((SDK / "client.py").read_text(encoding="utf-8"))
    lines = source.text.splitlines(keepends=True)
    parts = []
    for node in source.tree.body:
        is_function = isinstance(node, Function) and (node.name in source.awaited or node.name in _BOUND)
        if is_function or (isinstance(node, ast.ClassDef) and node.name in _CLASSES):
            parts.append(_renamed(_made(node, source, lines)))
    body = "\n\n\n".join(parts)
    return f"{_HEAD}\n{_imports(source, body)}\n\n\n{body}\n"


def _made(node: ast.stmt, source: _Source, lines: list[str]) -> str:
    """The text of a class or function with its awaits."""
    inserted: list[tuple[int, int, str]] = []

    def put(line: int, column: int, text: str) -> None:
        inserted.append((line, column, text))

    functions = [one for one in ast.walk(node) if isinstance(one, Function)]
    for function in functions:
        is_iterated = function.name in _ITERATED and any(
            isinstance(one, ast.Call) and ast.unparse(one.func) == "read_logs" for one in _own_nodes(function)
        )
        if function.name in source.awaited or is_iterated or function.name in _ENTERED:
            put(function.lineno, function.col_offset, "async ")
        for one in _own_nodes(function):
            if isinstance(one, ast.For) and _is_of_generator(one.iter, source):
                put(one.lineno, one.col_offset, "async ")
            if not (isinstance(one, ast.Call) and source.awaits(one)) or _is_of_generator(one, source):
                continue
            outer = _parent(one, function)
            if isinstance(outer, (ast.Subscript, ast.Attribute)) and outer.value is one:
                put(one.lineno, one.col_offset, "(await ")
                assert one.end_lineno is not None
                assert one.end_col_offset is not None
                put(one.end_lineno, one.end_col_offset, ")")
            else:
                put(one.lineno, one.col_offset, "await ")
    first = node.lineno
    made = lines[first - 1 : node.end_lineno]
    for line, column, text in sorted(inserted, reverse=True):
        old = made[line - first].encode()
        made[line - first] = (old[:column] + text.encode() + old[column:]).decode()
    return "".join(made).rstrip("\n")


def _is_of_generator(node: ast.AST, source: _Source) -> bool:
    """Whether an expression calls a generator that is awaited step by step."""
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in source.awaited and source.is_generator(name)


def _parent(node: ast.AST, root: ast.AST) -> ast.AST | None:
    return next((one for one in ast.walk(root) if any(child is node for child in ast.iter_child_nodes(one))), None)


def _renamed(text: str) -> str:
    text = text.replace("Thread-safe.", "For one event loop at a time.")
    text = text.replace("__enter__", "__aenter__").replace("__exit__", "__aexit__")
    # What the synchronous client asks at once is asked here with the first line.
    text = re.sub(
        r"^( +)return read_logs\((.*)\)$",
        r"\1async for line in await read_logs(\2):\n\1    yield line",
        text.replace("return await read_logs", "return read_logs"),
        flags=re.M,
    )
    return re.sub(rf"\b({'|'.join(_RENAMED)})\b", lambda found: _RENAMED[found[1]], text)


_HEAD = '''"""Generated by `python -m tools.reference` from `gpusched.sdk.client`: the same client for asyncio."""

from __future__ import annotations
'''


def _imports(source: _Source, body: str) -> str:
    """The imports that the body needs: those of the synchronous client, and what it defines itself."""
    names = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    own = {
        name
        for node in source.tree.body
        for name in _defined(node)
        if name in names and f"class {name}" not in body and f"def {name}(" not in body
    }
    standard: list[str] = []
    ours = ["from gpusched.sdk.async_link import AsyncLink"]
    typing_only: list[str] = []
    for node in source.tree.body:
        lazy = [one for one in node.body if isinstance(one, ast.ImportFrom)] if isinstance(node, ast.If) else []
        for one in (node, *lazy):
            if isinstance(one, ast.Import):
                standard += [f"import {alias.name}" for alias in one.names if alias.name in names]
            elif isinstance(one, ast.ImportFrom) and one.module not in ("__future__", "gpusched.sdk.link"):
                used = sorted(
                    {_RENAMED.get(alias.name, alias.name) for alias in one.names} & (names | {"TYPE_CHECKING"}),
                    key=_rank,
                )
                if not used:
                    continue
                line = _wrapped(f"from {one.module} import", used)
                target = (
                    typing_only if one is not node else ours if str(one.module).startswith("gpusched") else standard
                )
                target.append(line)
    ours.append(_wrapped("from gpusched.sdk.client import", sorted(own, key=_rank)))
    lazily = "\n\nif TYPE_CHECKING:\n" + "\n\n".join(f"    {line}" for line in typing_only)
    standard.sort(key=lambda line: (line.startswith("from"), line))
    ours.sort(key=lambda line: line.split()[1])
    return "\n".join(standard) + "\n\n" + "\n".join(ours) + lazily


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, (Function, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [one.id for one in node.targets if isinstance(one, ast.Name)]
    return []


def _rank(name: str) -> tuple[int, str]:
    """The order in which ruff wants imported names: constants, classes, the rest."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name.lower()


def _wrapped(start: str, names: list[str]) -> str:
    line = f"{start} {', '.join(names)}"
    return line if len(line) <= 120 else f"{start} (\n" + "".join(f"    {name},\n" for name in names) + ")"
