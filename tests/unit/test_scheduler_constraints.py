"""Labels that nodes must have: what is read, what is refused, and who passes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.scheduler.filters import parse_constraint

ADMITS = {
    "a label": ("a", "a", True),
    "a label that is not there": ("a", "b", False),
    "a part of a label is not the label": ("a1", "a100", False),
    "labels are compared letter by letter": ("A", "a", False),
    "both of two": ("a&b", "a b", True),
    "one of both": ("a&b", "a", False),
    "either of two": ("a|b", "b", True),
    "neither of two": ("a|b", "c", False),
    "and binds tighter than or, on the left": ("a&b|c", "c", True),
    "and binds tighter than or, on the right": ("a|b&c", "a", True),
    "and alone is not enough on the right": ("a|b&c", "b", False),
    "brackets bind tightest": ("(a|b)&c", "a", False),
    "brackets with both": ("(a|b)&c", "b c", True),
    "not": ("!a", "b", True),
    "not, when it is there": ("!a", "a", False),
    "not binds tighter than and": ("!a&b", "b", True),
    "not of brackets": ("!(a|b)", "b", False),
    "not of brackets, with neither": ("!(a|b)", "c", True),
    "not not": ("!!a", "a", True),
    "blanks do not matter": (" a & ( b | c ) ", "a c", True),
    "labels with signs": ("gpu-v100.2@x/y=3+4:5_", "gpu-v100.2@x/y=3+4:5_", True),
    "three in a row": ("a&b&c", "a b", False),
}


@pytest.mark.parametrize(("text", "labels", "admitted"), ADMITS.values(), ids=ADMITS)
def test_a_constraint_admits(text, labels, admitted):
    assert parse_constraint(text).admits(tuple(labels.split())) is admitted


REFUSED = {
    "": "a label is missing at its beginning",
    "   ": "a label is missing at its beginning",
    "a&": "a label is missing after '&'",
    "a|&b": "a label is missing after '|'",
    "&a": "a label is missing at its beginning",
    "!": "a label is missing after '!'",
    "(a": "a ')' is missing",
    "(a b)": "'b' is not expected here",
    "()": "a label is missing after '('",
    "a)": "')' is not expected after 'a'",
    "a b": "'b' is not expected after 'a'",
    "a!b": "'!' is not expected after 'a'",
    "[a|b]": "'[' cannot be in a label",
    "a*2": "'*' cannot be in a label",
    "a,b": "',' cannot be in a label",
    "(" * 60 + "a" + ")" * 60: "more than 50 nested brackets are not supported",
    "!" * 60 + "a": "more than 50 nested brackets are not supported",
}


@pytest.mark.parametrize(("text", "problem"), REFUSED.items(), ids=range(len(REFUSED)))
def test_an_unreadable_constraint_names_the_problem(text, problem):
    with pytest.raises(ValueError) as caught:
        parse_constraint(text)
    assert str(caught.value) == f"{text!r} is not a constraint: {problem}"


def test_an_oversized_constraint_is_refused():
    with pytest.raises(ValueError, match="at most 1000 characters; this one has 2001"):
        parse_constraint("a" + "&a" * 1000)


def test_the_labels_of_a_constraint_are_listed_once_in_order():
    assert parse_constraint("b&!a|(c&b)").labels == ("b", "a", "c")


TREES = st.recursive(
    st.sampled_from("abc"),
    lambda inner: st.one_of(
        st.tuples(st.just("!"), inner),
        st.tuples(st.sampled_from("&|"), inner, inner),
    ),
    max_leaves=8,
)


def written(tree):
    if isinstance(tree, str):
        return tree
    if tree[0] == "!":
        return f"!({written(tree[1])})"
    return f"({written(tree[1])}){tree[0]}({written(tree[2])})"


def holds(tree, labels):
    if isinstance(tree, str):
        return tree in labels
    if tree[0] == "!":
        return not holds(tree[1], labels)
    left, right = holds(tree[1], labels), holds(tree[2], labels)
    return (left and right) if tree[0] == "&" else (left or right)


@given(TREES, st.sets(st.sampled_from("abc")))
def test_a_constraint_respects_its_brackets(tree, labels):
    assert parse_constraint(written(tree)).admits(labels) is holds(tree, labels)


@given(st.text("ab&|!() ", max_size=12))
def test_any_text_is_read_or_refused_with_a_sentence(text):
    try:
        read = parse_constraint(text)
    except ValueError as error:
        assert str(error).startswith(repr(text))  # noqa: PT017
    else:
        assert set(read.labels) <= {*map("".join, _words(text))}


def _words(text):
    word = ""
    for character in text + " ":
        if character in "ab":
            word += character
        elif word:
            yield word
            word = ""
