"""The heat map as a picture: decoded by a reader of the test's own."""

from __future__ import annotations

import struct
import zlib
from base64 import b64decode

import pytest

from gpusched.addons.web.heat_map import CELL_HEIGHT, LINE, legend, unknown
from gpusched.addons.web.heat_map import heat_map as draw

CELL_WIDTH = 4


def heat_map(rows: list[list[float | None]]) -> str:
    return draw(rows, CELL_WIDTH)


def decode(address: str) -> tuple[int, int, list[list[tuple[int, ...]]]]:
    """Width, height, and pixels as red, green, blue, alpha."""
    head, _, text = address.partition(",")
    assert head == "data:image/png;base64"
    data = b64decode(text, validate=True)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size]) == (zlib.crc32(kind + body),)
        chunks[kind] = body
        at += 12 + size
    width, height, depth, colours, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, colours, rest) == (8, 3, [0, 0, 0])
    raw, palette, alpha = zlib.decompress(chunks[b"IDAT"]), chunks[b"PLTE"], chunks[b"tRNS"]
    assert len(raw) == height * (width + 1)
    pixels = []
    for y in range(height):
        line = raw[y * (width + 1) : (y + 1) * (width + 1)]
        assert line[0] == 0
        pixels.append([(*palette[3 * one : 3 * one + 3], alpha[one]) for one in line[1:]])
    return width, height, pixels


def test_each_value_is_a_cell_in_its_colour_and_darker_is_less() -> None:
    width, height, pixels = decode(heat_map([[0.0, 0.5, 1.0], [1.0, 1.0, 0.0]]))
    assert (width, height) == (3 * CELL_WIDTH, 2 * LINE)
    dark, middle, bright = (pixels[0][x * CELL_WIDTH] for x in range(3))
    assert (dark, bright) == ((0, 34, 78, 255), (254, 232, 56, 255))
    assert sum(dark[:3]) < sum(middle[:3]) < sum(bright[:3])
    assert pixels[LINE][0] == bright
    for y in range(CELL_HEIGHT):
        assert pixels[y][:CELL_WIDTH] == [dark] * CELL_WIDTH


def test_what_is_unknown_is_hatched_and_no_colour_of_a_value() -> None:
    _, _, pixels = decode(heat_map([[None] * 8, [index / 7 for index in range(8)]]))
    hatched = {one for y in range(CELL_HEIGHT) for one in pixels[y]}
    values = {one for y in range(LINE, LINE + CELL_HEIGHT) for one in pixels[y]}
    assert len(hatched) == 2
    assert not hatched & values
    # Stripes go on from cell to cell.
    assert pixels[0] == pixels[0][:1] + pixels[0][1:]
    assert pixels[1][:-1] == pixels[0][1:]


def test_cards_are_apart() -> None:
    _, _, pixels = decode(heat_map([[1.0], [1.0]]))
    assert {one[3] for one in pixels[CELL_HEIGHT]} == {0}


@pytest.mark.parametrize("rows", [[], [[]], [[], [0.5]], [[float("inf"), -3.0, 7.0]]])
def test_odd_input_is_still_a_picture(rows: list[list[float | None]]) -> None:
    width, height, _ = decode(heat_map(rows))
    assert width >= 1
    assert height >= 1


def test_a_day_of_64_cards_is_small() -> None:
    rows: list[list[float | None]] = [[(index * 7 + card) % 100 / 100 for index in range(288)] for card in range(64)]
    assert len(heat_map(rows)) < 60_000


def test_the_legend_goes_from_none_to_all() -> None:
    _, _, pixels = decode(legend())
    assert (pixels[0][0][:3], pixels[0][-1][:3]) == ((0, 34, 78), (254, 232, 56))
    assert decode(unknown())[2][0] == decode(heat_map([[None] * 6]))[2][0]
