"""The call that a notebook's cell becomes in its job."""

from __future__ import annotations

import ast
import linecache
import pickle
import sys
import types
from collections.abc import Sequence
from typing import Any

FILE = "<cell>"
"""File name of the code in tracebacks."""


class MissingOutput(Exception):
    """The cell defined no variable that it was to return."""


def run_cell(source: str, inputs: bytes, outputs: Sequence[str]) -> bytes:
    """Run the code as a main program with these packed variables; returns those of the outputs, packed.

    Prints the value of a last expression, as a notebook does. Raises: what the code raises; MissingOutput.
    """
    module = types.ModuleType("__main__")
    # Classes of the cell are found where pickle looks for them, and their code where tracebacks do.
    sys.modules["__main__"] = module
    linecache.cache[FILE] = len(source), None, source.splitlines(keepends=True), FILE
    module.__dict__.update(pickle.loads(inputs))
    body, last = parse(source)
    exec(compile(body, FILE, "exec"), module.__dict__)
    if last is not None:
        value = eval(compile(last, FILE, "eval"), module.__dict__)
        if value is not None:
            print(repr(value))
    found = module.__dict__
    for name in outputs:
        if name not in found:
            raise MissingOutput(f"the cell has defined no variable {name}")
    return packed({name: found[name] for name in outputs})


def parse(source: str) -> tuple[ast.Module, ast.Expression | None]:
    """The statements, and a last expression by itself. Raises: SyntaxError."""
    tree = ast.parse(source, FILE)
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";"):
        last = tree.body.pop()
        assert isinstance(last, ast.Expr)
        return tree, ast.Expression(last.value)
    return tree, None


def packed(value: Any) -> bytes:
    """Pickled by cloudpickle: what a notebook defines cannot be imported elsewhere. Raises: the error of pickling."""
    try:
        import cloudpickle  # type: ignore[import-not-found, import-untyped, unused-ignore]  # an extra
    except ImportError:
        found = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        if b"__main__" in found:
            from gpusched.extras import install_command  # hardly ever needed

            raise pickle.PicklingError(
                f"functions and classes of a notebook travel by cloudpickle: {install_command('executor')}"
            ) from None
        return found
    return bytes(cloudpickle.dumps(value, pickle.HIGHEST_PROTOCOL))
