"""What requests ask, as structs: each gives the check, the sentence about a mistake and the schema at once.

`RequestBody` is the JSON object of a request, `RequestQuery` are its parameters. Both take the `{id}` of a path as
`path_id`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from reprlib import repr as shortened
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from msgspec import Meta

from gpusched.api.schema import check_text, unknown_field
from gpusched.errors import UsageError
from gpusched.model.option import MAX_TEXT
from gpusched.model.request import MAX_CPUS
from gpusched.model.spec import MAX_INSTANT
from gpusched.model.units import printable

PATH_ID = "path_id"
"""The field that a route with `{id}` fills."""
Name = Annotated[str, Meta(max_length=256)]
Names = Annotated[tuple[Name, ...], Meta(max_length=2048)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
What = Annotated[Text, Meta(description="The command behind it, for the record of settings.")]


def about(description: str, **limits: Any) -> Meta:
    """What a field means, and its limits as for `Meta`."""
    return Meta(description=description, **limits)


def one_of(words: Sequence[str], description: str | None = None) -> Meta:
    """A text that is one of these words."""
    pattern = rf"^({'|'.join(map(re.escape, words))})\Z"
    return Meta(pattern=pattern, description=description, extra_json_schema={"enum": list(words)})


Count = Annotated[int, Meta(ge=0, le=10**9)]
Number = Annotated[int, Meta(ge=1, le=10**9)]
"""Of something that is counted from 1."""
Instant = Annotated[float, Meta(ge=0, le=MAX_INSTANT)]
"""UTC epoch seconds."""
Cores = Annotated[float, Meta(ge=0, le=MAX_CPUS)]
Signal = Annotated[int, Meta(ge=1, le=64)]
MAX_WAIT_S = 300.0
Timeout = Annotated[float, about("answer after this long at the latest", ge=0, le=MAX_WAIT_S)]
_REFUSED = (msgspec.ValidationError, UnicodeEncodeError)
"""The second for a key with surrogates, of which msgspec wants the UTF-8."""
_WORDS = {
    "string": "a text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "object": "a JSON object",
    "array": "a list",
}


class Asked(msgspec.Struct):
    """What a request asks. A field is absent or null where it has its default."""

    hint: ClassVar[str] = "see GET /v1/openapi.json"
    """What to type next after a mistake."""

    def given(self) -> dict[str, Any]:
        """The values that are not None, by name. Raises: UsageError for texts that nothing can be."""
        found = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        for name, value in found.items():
            text = value if isinstance(value, str) else "".join(value) if isinstance(value, tuple) else ""
            if "\0" in text:
                raise UsageError(f"{name} holds a NUL byte, which no path, name or argument can", "remove it")
            check_text(name, text)
        return found

    def printable(self) -> dict[str, Any]:
        """As `given`, with texts that hold nothing for terminals."""
        return {name: printable(one) if isinstance(one, str) else one for name, one in self.given().items()}


class RequestBody(Asked, forbid_unknown_fields=True):
    """The JSON object of a request."""


class RequestQuery(Asked):
    """The parameters of a request. Others are ignored."""


class OneJob(RequestQuery):
    """A request about one job."""

    path_id: str


_Kind = TypeVar("_Kind", bound=Asked)


def read_asked(values: Mapping[str, Any], kind: type[_Kind], *, is_text: bool = False) -> _Kind:
    """Check what a request says. Raises: UsageError that names the value and says what was expected.

    Args: is_text: numbers and flags are written as texts, as in a query.
    """
    try:
        found = msgspec.convert(values, kind, strict=not is_text)
    except _REFUSED:
        given = {name: value for name, value in values.items() if value is not None}
        if len(given) == len(values):
            raise _mistake(values, kind, is_text) from None
        return read_asked(given, kind, is_text=is_text)
    return found


def _mistake(values: Mapping[str, Any], kind: type[Asked], is_text: bool) -> UsageError:
    """The first mistake in values that are not of this kind."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    is_strict = kind.__struct_config__.forbid_unknown_fields
    for name in values:
        if name not in fields and (is_strict or not name.isprintable()):
            return unknown_field(name, fields, "parameter" if is_text else "field")
    shapes = schema_of(kind)["properties"]
    for name, field in fields.items():
        value = values.get(name)
        if _is_of(value, field.type, is_text) or not (name in values or field.required):
            continue
        if value is None or value in ("", []):
            return UsageError(f"no {shapes[name].get('title', name)} given", kind.hint)
        needed = wanted(shapes[name])
        if is_text:
            needed = needed.replace(_WORDS["boolean"], "1 or 0")
        return UsageError(f"{name} is {printable(shortened(value), 60)}; it must be {needed}", kind.hint)
    raise AssertionError(f"{kind.__name__} is refused as a whole, and none of its fields is")


def _is_of(value: object, kind: Any, is_text: bool) -> bool:
    try:
        msgspec.convert(value, kind, strict=not is_text)
    except _REFUSED:
        return False
    return True


def wanted(shape: Mapping[str, Any]) -> str:
    """What a value of this JSON Schema must be, in words."""
    if "enum" in shape:
        return "one of " + ", ".join(str(word) for word in shape["enum"] if word is not None)
    if "anyOf" in shape:
        return " or ".join(map(wanted, shape["anyOf"]))
    text = " or ".join(_words(shape))
    if "items" in shape:
        words = shape["items"].get("enum") or [word.removeprefix("a ") + "s" for word in _words(shape["items"])]
        text += " of " + " or ".join(words)
    low, high = (shape.get(key, shape.get(f"exclusive{key.capitalize()}")) for key in ("minimum", "maximum"))
    if low is not None and high is not None and "exclusiveMinimum" not in shape:
        return f"{text} from {low:.15g} to {high:.15g}"
    if low is not None:
        text += f" above {low:.15g}" if "exclusiveMinimum" in shape else f" of at least {low:.15g}"
    if high is not None:
        text += f" of at most {high:.15g}"
    if (most := shape.get("maxLength", shape.get("maxItems"))) is not None:
        text += f" of at most {most} {'characters' if 'maxLength' in shape else 'entries'}"
    return text


def _words(shape: Mapping[str, Any]) -> list[str]:
    types = shape.get("type", "object")
    return [_WORDS[one] for one in ([types] if isinstance(types, str) else types) if one != "null"]


@cache
def schema_of(kind: type[Asked]) -> dict[str, Any]:
    """JSON Schema of what a request says; without what its path says."""
    (found,), parts = msgspec.json.schema_components([kind], ref_template="{name}")
    shape = parts[found["$ref"]]
    properties = {name: _flat(one) for name, one in shape["properties"].items() if name != PATH_ID}
    required = [name for name in shape.get("required", ()) if name in properties]
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        **({"required": required} if required else {}),
    }


def _flat(shape: Mapping[str, Any]) -> dict[str, Any]:
    """A schema with a list of types in place of simple alternatives, and without defaults that say nothing."""
    if "$ref" in shape:
        return {"$ref": shape["$ref"]}
    flat = dict(shape)
    for key in ("items", "additionalProperties"):
        if isinstance(flat.get(key), dict):
            flat[key] = _flat(flat[key])
    if "default" in flat and not flat["default"]:
        del flat["default"]
    if "enum" in flat:
        # The pattern by which it is checked says the same.
        flat.pop("pattern", None)
    choices = [_flat(one) for one in flat.pop("anyOf", ())]
    real = [one for one in choices if one != {"type": "null"}]
    if len(real) > 1 and any(set(one) != {"type"} for one in real):
        flat["anyOf"] = choices
    elif choices:
        flat = {**real[0], **flat}
        if "$ref" not in flat:
            flat["type"] = [one["type"] for one in choices]
        if "enum" in flat:
            flat["enum"] = [*flat["enum"], None]
    if "description" in flat:
        flat["description"] = flat.pop("description")
    return flat
