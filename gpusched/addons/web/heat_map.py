"""The use of many cards over time as one picture, a line a card, in the colours of cividis. Pure: values to PNG."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from collections.abc import Sequence

CELL_HEIGHT, GAP = 14, 2
"""Of one value in pixels, and the space below a card."""
LINE = CELL_HEIGHT + GAP
_ANCHORS = bytes.fromhex(
    "00224e 00285b 002e6a 053371 1a386f 273e6e 32436d 3b496c 434e6c 4b546c 535a6d "
    "5a5f6e 61656f 686a71 6f7073 767676 7d7c78 848279 8c8878 938e78 9b9476 a39a74 "
    "aba072 b4a76f bcae6c c4b468 cdbb63 d5c25e dec958 e7d150 f0d846 f9e03a fee838"
)
"""Colours of cividis (Nuñez, Anderton, Renslow 2018, PLOS ONE 13(7)), which reads the same without red or green: 33,
from 0 to 1."""
_KNOWN = 250
"""Colours for values; unknown ones are hatched, and gaps transparent."""
_LIGHT, _DARK, _NOTHING = 251, 252, 253
_HATCH = 6
"""Pixels from one stripe to the next."""
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def heat_map(rows: Sequence[Sequence[float | None]], cell_width: int) -> str:
    """A PNG as data: address. Args: rows: by card; values 0 to 1, None where nothing is known; cell_width: pixels."""
    width = max(1, cell_width * max((len(row) for row in rows), default=0))
    hatching = [int.from_bytes(_hatched(width, y), "big") for y in range(_HATCH)]
    gap = [bytes([_NOTHING]) * width] * GAP
    lines: list[bytes] = []
    for row in rows:
        # One number a line: the cells with values, and a mask of those without.
        known = b"".join(bytes([0 if value is None else _colour(value)]) * cell_width for value in row)
        mask = b"".join((b"\xff" if value is None else b"\0") * cell_width for value in row)
        cells = int.from_bytes(known.ljust(width, bytes([_NOTHING])), "big")
        holes = int.from_bytes(mask.ljust(width, b"\0"), "big")
        y = len(lines)
        lines += [(cells | hatching[at % _HATCH] & holes).to_bytes(width, "big") for at in range(y, y + CELL_HEIGHT)]
        lines += gap
    return _data_address(_png(width, lines))


def _colour(value: float) -> int:
    return round(min(1.0, max(0.0, value)) * (_KNOWN - 1))


def legend(width: int = 120) -> str:
    """The colours from 0 to 1 as a PNG."""
    line = bytes(round(x / (width - 1) * (_KNOWN - 1)) for x in range(width))
    return _data_address(_png(width, [line] * CELL_HEIGHT))


def unknown(width: int = 24) -> str:
    """The hatching of unknown values as a PNG."""
    return _data_address(_png(width, [_hatched(width, y) for y in range(CELL_HEIGHT)]))


def _hatched(width: int, y: int) -> bytes:
    return bytes(_DARK if (x + y) % _HATCH < 2 else _LIGHT for x in range(width))


def _palette() -> bytes:
    last = len(_ANCHORS) // 3 - 1
    found = bytearray()
    for number in range(_KNOWN):
        place = number / (_KNOWN - 1) * last
        low = min(int(place), last - 1)
        first, second = _ANCHORS[3 * low : 3 * low + 3], _ANCHORS[3 * low + 3 : 3 * low + 6]
        found += bytes(round(a + (b - a) * (place - low)) for a, b in zip(first, second, strict=True))
    # Between the colours of both themes, so that hatching is seen on either.
    return bytes(found) + bytes(3) * (_LIGHT - _KNOWN) + bytes((158, 162, 166)) + bytes((112, 116, 120)) + bytes(3)


def _png(width: int, lines: Sequence[bytes]) -> bytes:
    opaque = b"\xff" * _NOTHING + b"\x00"
    return _SIGNATURE + b"".join(
        (
            # Eight bits a pixel, by palette.
            _chunk(b"IHDR", struct.pack(">IIBBBBB", max(1, width), max(1, len(lines)), 8, 3, 0, 0, 0)),
            _chunk(b"PLTE", _palette()),
            _chunk(b"tRNS", opaque),
            _chunk(b"IDAT", zlib.compress(b"".join(b"\0" + line for line in lines) or b"\0\0", 6)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _data_address(png: bytes) -> str:
    return "data:image/png;base64," + b64encode(png).decode()
