"""Stand-ins for Django's classes, which have no types, for type checkers."""

from typing import Any


class Untyped:
    """A class of which nothing is known. One derived from it is known to type checkers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any: ...
