"""JSON by the interpreter's own accelerator, without importing `json`.

`json` imports regular expressions, enums and collections, which take longer than all the rest of a command.
Interpreters with a missing or different accelerator use `json` instead; results are the same.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_BLANKS = " \t\n\r"


def _slow() -> tuple[Callable[[object], str], Callable[[str], Any]]:
    import json

    return lambda value: json.dumps(value, separators=(",", ":")), json.loads


def _fast() -> tuple[Callable[[object], str], Callable[[str], Any]]:
    # The names that json.encoder and json.scanner expect, with their arguments.
    import _json

    class Rules:
        """Default decoding rules of json.JSONDecoder."""

        strict = True
        object_hook = None
        object_pairs_hook = None
        parse_float = float
        parse_int = int
        parse_constant = {"-Infinity": float("-inf"), "Infinity": float("inf"), "NaN": float("nan")}.__getitem__
        memo: dict[str, str] = {}  # noqa: RUF012  an attribute that the scanner requires

    def refuse(value: object) -> object:
        raise TypeError(f"{type(value).__name__} cannot be written as JSON")

    encoder: Any = _json.make_encoder
    encode = encoder(None, refuse, _json.encode_basestring_ascii, None, ":", ",", False, False, True)
    scanner: Any = _json.make_scanner
    scan = scanner(Rules)

    def write(value: object) -> str:
        return "".join(encode(value, 0))

    def read(text: str) -> Any:
        text = text.strip(_BLANKS)
        try:
            value, end = scan(text, 0)
        except (StopIteration, SystemError):
            # Python 3.10's scanner fails with SystemError instead of the real error unless json is loaded.
            end = -1
        # `json` reports the error in its own words.
        return value if end == len(text) else _slow()[1](text)

    if read(write({"a": [1, 0.5, None, True, "\ud800"]})) != {"a": [1, 0.5, None, True, "\ud800"]}:
        raise TypeError("the accelerator has changed")
    return write, read


try:
    _write, _read = _fast()
except (ImportError, AttributeError, TypeError):
    _write, _read = _slow()


def dumps(value: object) -> str:
    """Encode compactly, ASCII only. Raises: TypeError for values without a JSON equivalent."""
    return _write(value)


def loads(content: str | bytes | bytearray) -> Any:
    """Decode one document. Raises: ValueError."""
    return _read(content if isinstance(content, str) else content.decode("utf-8", "surrogatepass"))
