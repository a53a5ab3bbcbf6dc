"""A refusal: what can never be, and what could be asked for in its place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request can never be granted, and what could be asked for in its place."""

    text: str
    hint: str
