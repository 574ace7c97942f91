"""Requests to the health server of a worker, and its answers."""

from __future__ import annotations

from typing import NamedTuple


class Question(NamedTuple):
    """A request: its decoded path, its query, and the content that its sender accepts."""

    path: str
    query: str
    accept: str


class Answer(NamedTuple):
    """The answer to a request."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
