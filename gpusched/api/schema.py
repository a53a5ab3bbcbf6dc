"""Fields of requests, with their checks and documentation; `model.spec` declares those of jobs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import isfinite
from typing import Any

from gpusched.errors import UsageError
from gpusched.model import spec
from gpusched.model.option import MAX_OWN, MAX_UNITS, Field
from gpusched.model.units import MAX_SECONDS, closest, printable
from gpusched.model.variant_words import variant_fields

SPEC_FIELDS = {name: field for name, field in spec.FIELDS.items() if name != "throttle"}
"""Fields of a submission."""
UPDATE_FIELDS = spec.UPDATABLE
VARIANT_FIELDS = variant_fields()
"""Fields of a variant."""


def json_schema(field: Field) -> dict[str, Any]:
    """JSON Schema of a field for the OpenAPI document."""
    shape: dict[str, Any]
    if field.kind == "strings":
        shape = {"type": "array", "items": {"type": "string"}}
    elif field.kind == "map":
        shape = {"type": "object", "additionalProperties": {"type": "string"}}
    elif field.kind == "counts":
        number = {"type": "integer", "minimum": 1, "maximum": MAX_UNITS}
        shape = {"type": "object", "additionalProperties": number}
    elif field.kind == "notice":
        shape = {
            "type": "object",
            "required": ["signal", "before_s", "main_only"],
            "additionalProperties": False,
            "properties": {
                "signal": {"type": "integer", "minimum": 1, "maximum": 64},
                "before_s": {"type": "integer", "minimum": 0, "maximum": MAX_SECONDS},
                "main_only": {"type": "boolean"},
            },
        }
    elif field.kind == "variants":
        shape = {
            "type": "array",
            "maxItems": spec.MAX_VARIANTS - 1,
            "items": object_schema({name: json_schema(one) for name, one in VARIANT_FIELDS.items()}),
        }
    else:
        shape = {"type": "string" if field.kind == "word" else field.kind}
    if shape["type"] == "string" and not field.choices and field.most < MAX_OWN:
        shape["maxLength"] = field.most
    if field.low is not None:
        shape["exclusiveMinimum" if field.exclusive_low else "minimum"] = field.low
    if field.high is not None:
        shape["maximum"] = field.high
    if field.choices:
        shape["enum"] = list(field.choices)
    if field.words:
        shape["pattern"] = f"^({'|'.join(field.words)})$"
    if field.nullable:
        shape["type"] = [shape["type"], *(["string"] if field.words else []), "null"]
        if field.choices:
            shape["enum"].append(None)
    shape["description"] = field.doc
    return shape


def object_schema(properties: dict[str, Any]) -> dict[str, Any]:
    """JSON Schema of an object with these properties and no others."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


def read_object(value: object, what: str) -> dict[str, Any]:
    """Check that a value is a JSON object. Raises: UsageError that says what was expected."""
    if not isinstance(value, dict):
        raise UsageError(f"{what} must be a JSON object", "see GET /v1/openapi.json")
    return value


def check_fields(values: Mapping[str, Any], fields: Mapping[str, Field]) -> dict[str, Any]:
    """Check every value for type and range. Null means absent. Raises: UsageError."""
    checked = {}
    for name, value in values.items():
        field = fields.get(name)
        if field is None:
            raise unknown_field(name, sorted(fields))
        if value is None and field.nullable:
            continue
        _check_length(name, value, field)
        checked[name] = _check(name, value, field)
    return checked


def unknown_field(name: str, known: Collection[str], what: str = "field") -> UsageError:
    """The error about a key that would otherwise be ignored."""
    near = closest(name, known)
    hint = f"did you mean {near!r}?" if near else f"known {what}s: " + ", ".join(known)
    return UsageError(f"unknown {what} {printable(name, 60)!r}", hint)


def _check_length(name: str, value: Any, field: Field) -> None:
    """Refuse overlong texts, since the cost of matching and expanding them grows with their length."""
    if isinstance(value, str):
        size = len(value)
    elif isinstance(value, (list, dict)):
        size = sum(len(word) + 1 for word in value if isinstance(word, str))
    else:
        return
    if size > field.most:
        raise UsageError(f"{name} has {size} characters; at most {field.most} are accepted", "write it shorter")


def _check(name: str, value: Any, field: Field) -> Any:
    kind = field.kind
    if kind in ("string", "word"):
        if not isinstance(value, str):
            raise _wrong(name, value, "a string")
        if "\0" in value and name != "script":
            raise UsageError(f"{name} holds a NUL byte, which no path, name or argument can", "remove it")
        if field.choices and value not in field.choices:
            raise _wrong(name, value, "one of " + ", ".join(field.choices))
        check_text(name, value)
        if kind == "word" and (not value.isprintable() or not value or " " in value or len(value) > spec.MAX_NAME):
            raise _wrong(name, value, "one word")
    elif kind == "boolean":
        if not isinstance(value, bool):
            raise _wrong(name, value, "true or false")
    elif kind in ("integer", "number"):
        _check_number(name, value, field)
    elif kind == "strings":
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise _wrong(name, value, "a list of strings")
        if any("\0" in word for word in value):
            raise UsageError(f"{name} holds a NUL byte, which no argument can", "remove it")
        check_text(name, "".join(value))
    elif kind == "map":
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            raise _wrong(name, value, "an object of strings")
        if not stands_for_bytes("".join((*value, *value.values()))):
            for key, text in value.items():
                check_text(f"{name}.{key}", key)
                check_text(f"{name}.{key}", text)
    elif kind == "counts":
        if not isinstance(value, dict):
            raise _wrong(name, value, "an object of names and whole numbers")
        for key, count in value.items():
            check_text(f"{name}.{key}", key)
            _check_number(f"{name}.{printable(key, 60)}", count, _COUNT)
    elif kind == "variants":
        return _check_variants(name, value)
    else:
        notice = read_object(value, name)
        if set(notice) != {"signal", "before_s", "main_only"}:
            raise _wrong(name, sorted(notice), "an object with signal, before_s and main_only")
        _check_number("notice.signal", notice["signal"], Field("integer", "", (1, 64)))
        _check_number("notice.before_s", notice["before_s"], _BEFORE)
        if not isinstance(notice["main_only"], bool):
            raise _wrong("notice.main_only", notice["main_only"], "true or false")
    return value


def _check_variants(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise _wrong(name, value, "a list of objects")
    if len(value) >= spec.MAX_VARIANTS:
        raise UsageError(
            f"the job has {len(value) + 1} variants; at most {spec.MAX_VARIANTS} are accepted",
            "keep those that differ most, for example: -g 'a100:2|rtx3090:4'",
        )
    found = []
    for number, one in enumerate(value, 2):
        wanted = read_object(one, f"{name}[{number - 2}]")
        odd = [key for key in wanted if key not in VARIANT_FIELDS]
        if odd:
            raise UsageError(
                f"variant {number} states {printable(odd[0], 60)}, and variants differ in resources, tasks, nodes and "
                "time alone",
                "give it to the whole job, or submit two jobs",
            )
        checked = check_fields(wanted, VARIANT_FIELDS)
        if not checked:
            raise UsageError(f"variant {number} states nothing", "for example: --or '-g rtx3090:4 -c 16'")
        found.append(checked)
    return found


def check_text(name: str, value: str) -> None:
    if not stands_for_bytes(value):
        raise UsageError(f"{printable(name, 60)} holds characters that cannot be encoded", "remove it")


def stands_for_bytes(text: str) -> bool:
    """Whether it has no surrogates but those of bytes that are not UTF-8."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


_COUNT = Field("integer", "", (1, MAX_UNITS))
_BEFORE = Field("integer", "", (0, MAX_SECONDS))


def _check_number(name: str, value: Any, field: Field) -> None:
    if value in field.words:
        return
    whole = field.kind == "integer"
    is_number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not is_number or (isinstance(value, float) and not isfinite(value)):
        wanted = ", ".join(("a whole number" if whole else "a number", *field.words[:-1]))
        raise _wrong(name, value, " or ".join((wanted, *field.words[-1:])))
    low, high = field.low, field.high
    if low is not None and (value < low or (field.exclusive_low and value <= low)):
        least = f"above {low:g}" if field.exclusive_low else f"at least {low:g}"
        raise UsageError(f"{name} is {printable(str(value), 60)}; it must be {least}", "see gsub --help")
    if high is not None and value > high:
        raise UsageError(f"{name} is {printable(str(value), 60)}; it must be at most {high:g}", "see gsub --help")


def _wrong(name: str, value: object, wanted: str) -> UsageError:
    return UsageError(f"{name} is {printable(repr(value), 60)}; it must be {wanted}", "see gsub --help")
