"""The type variables of public classes, with defaults: ``Message`` alone means ``Message[Any]``.

Without defaults, strict type checkers refuse a class whose parameter is left out. Python itself has
them from 3.13 on (PEP 696). Type checkers know ``typing_extensions`` even where it is not
installed, so delayq does not depend on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import ParamSpec, TypeVar

    T = TypeVar("T", default=Any)
    P = ParamSpec("P", default=...)
    R_co = TypeVar("R_co", covariant=True, default=Any)
else:
    from typing import ParamSpec, TypeVar

    T = TypeVar("T")
    P = ParamSpec("P")
    R_co = TypeVar("R_co", covariant=True)
