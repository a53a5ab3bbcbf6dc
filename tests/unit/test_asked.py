"""What requests ask: one struct gives the check, the sentence about a mistake and the schema."""

from __future__ import annotations

from typing import Annotated, Any

import jsonschema
import pytest
from msgspec import Meta

from gpusched.api.asked import Asked, Name, RequestBody, RequestQuery, about, one_of, read_asked, schema_of
from gpusched.api.routes import ROUTES
from gpusched.errors import UsageError

_Size = Annotated[float, Meta(ge=0, le=10)]


class PaintBody(RequestBody):
    hint = "for example: paint 3"
    targets: Annotated[tuple[Name, ...], about("What to paint.", min_length=1, title="wall")]
    signal: Annotated[int, Meta(ge=1, le=64)] | None = None
    size: Annotated[_Size | None, about("How large.")] = None
    above: Annotated[float, Meta(gt=0)] = 1.0
    to: Annotated[str, one_of(("red", "blue"))] = "red"
    ids: tuple[int | str, ...] = ()
    spec: dict[str, Any] | None = None
    is_dry: bool = False


class LookQueryOfTest(RequestQuery):
    limit: Annotated[int, Meta(ge=1, le=500)] = 100
    fold: bool = False


GOOD: dict[str, Any] = {"targets": ["a"]}
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a value that is missing": ({}, "no wall given", "for example: paint 3"),
    "an empty list": ({"targets": []}, "no wall given", "for example: paint 3"),
    "one entry of another type": ({"targets": [1]}, "targets is [1]; it must be a list of texts", ""),
    "a number out of range": ({**GOOD, "signal": 99}, "signal is 99; it must be a whole number from 1 to 64", ""),
    "a flag for a number": ({**GOOD, "signal": True}, "signal is True; it must be a whole number from 1 to 64", ""),
    "not a number": ({**GOOD, "size": float("nan")}, "size is nan; it must be a number from 0 to 10", ""),
    "too little": ({**GOOD, "above": 0}, "above is 0; it must be a number above 0", ""),
    "another word": ({**GOOD, "to": "green"}, "to is 'green'; it must be one of red, blue", ""),
    "a word with a line behind it": ({**GOOD, "to": "red\n"}, "to is 'red\\n'; it must be one of red, blue", ""),
    "ids of two types": ({**GOOD, "ids": [1.5]}, "ids is [1.5]; it must be a list of whole numbers or texts", ""),
    "a text for an object": ({**GOOD, "spec": "x"}, "spec is 'x'; it must be a JSON object", ""),
    "a text for a flag": ({**GOOD, "is_dry": "yes"}, "is_dry is 'yes'; it must be true or false", ""),
    "a mistyped key": ({**GOOD, "sise": 1}, "unknown field 'sise'", "did you mean 'size'?"),
    "a key that is no text": ({**GOOD, "\udcff": 1}, "unknown field '\\\\udcff'", "known fields: targets, signal,"),
    "a key that there is not": ({**GOOD, "colour": 1}, "unknown field 'colour'", "known fields: targets, signal,"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_mistake_is_one_sentence_with_the_value_and_what_to_type(case: str) -> None:
    values, sentence, hint = REFUSED[case]
    with pytest.raises(UsageError) as caught:
        read_asked(values, PaintBody)
    assert caught.value.message.startswith(sentence)
    assert caught.value.hint.startswith(hint)
    assert caught.value.hint


def test_null_is_absent() -> None:
    found = read_asked({**GOOD, "signal": None, "to": None, "ids": None, "is_dry": None}, PaintBody)
    assert found == read_asked(GOOD, PaintBody)
    assert found.given() == {"targets": ("a",), "above": 1.0, "to": "red", "ids": (), "is_dry": False}


@pytest.mark.parametrize("text", ["a\0b", "a\ud800"])
def test_texts_that_no_name_can_be_are_refused_where_values_are_taken_over(text: str) -> None:
    with pytest.raises(UsageError, match="targets holds"):
        read_asked({"targets": [text]}, PaintBody).given()
    assert read_asked({"targets": ["\x1b"], "to": "blue"}, PaintBody).printable()["to"] == "blue"


def test_the_values_of_a_query_are_texts() -> None:
    assert read_asked({"limit": "7", "fold": "1", "other": "x"}, LookQueryOfTest, is_text=True).limit == 7
    for values, sentence in (
        ({"limit": "0"}, "limit is '0'; it must be a whole number from 1 to 500"),
        ({"limit": ""}, "no limit given"),
        ({"fold": "2"}, "fold is '2'; it must be 1 or 0"),
        ({"limit": "\udcff"}, "limit is '\\udcff'; it must be a whole number from 1 to 500"),
        ({"\udcff": "1"}, "unknown parameter '\\\\udcff'"),
    ):
        with pytest.raises(UsageError) as caught:
            read_asked(values, LookQueryOfTest, is_text=True)
        assert caught.value.message == sentence


def test_the_schema_refuses_what_the_check_refuses() -> None:
    schema = schema_of(PaintBody)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(GOOD, schema)
    for case, (values, _, _) in REFUSED.items():
        if case != "not a number":  # JSON has none
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(values, schema)
    assert schema["properties"]["size"] == {
        "type": ["number", "null"],
        "minimum": 0.0,
        "maximum": 10.0,
        "description": "How large.",
    }
    assert schema["required"] == ["targets"]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_each_route_says_what_it_asks(route: Any) -> None:
    kind = route.asks
    assert issubclass(kind, Asked)
    assert ("{id}" in route.path) == ("path_id" in kind.__struct_fields__)
    assert route.method == "POST" or not issubclass(kind, RequestBody)
    jsonschema.Draft202012Validator.check_schema(schema_of(kind))
