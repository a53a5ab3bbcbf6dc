"""The light JSON reads and writes what `json` does, and refuses what `json` refuses, on every Python."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched import quickjson

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()), inner),
)


@given(VALUES)
def test_quickjson_reads_and_writes_like_json(value: object) -> None:
    text = quickjson.dumps(value)
    assert text == json.dumps(value, separators=(",", ":"))
    assert quickjson.loads(text) == json.loads(text)
    assert quickjson.loads(f" \n{json.dumps(value, indent=1)}\t\r\n".encode()) == value


def test_undecodable_bytes_travel_as_escapes() -> None:
    assert quickjson.dumps("\udcff") == '"\\udcff"'
    assert quickjson.loads(b'"\\udcff"') == "\udcff"


@pytest.mark.parametrize("text", ["", " ", "{", "[1,]", "[1 2]", "1 2", '{"a":1}x', "tru", '"\n"', "{1:2}", '"\\q"'])
def test_invalid_json_is_a_value_error_before_json_is_loaded(text: str) -> None:
    code = (
        "import sys\nfrom gpusched import quickjson\nassert 'json' not in sys.modules\n"
        "try: quickjson.loads(sys.argv[1])\nexcept ValueError as error: print(type(error).__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}", text],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("JSONDecodeError\n", "")


def test_an_unserializable_value_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="set"):
        quickjson.dumps({"a": {1}})


def test_without_the_accelerator_json_is_used() -> None:
    write, read = quickjson._slow()
    assert write({"a": [1, None]}) == quickjson.dumps({"a": [1, None]})
    assert read("[1, 2]") == quickjson.loads("[1, 2]")
