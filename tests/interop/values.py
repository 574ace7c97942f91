"""Values in the lines between the tests and Java: the other half of ``Values.java``."""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from delayq.codecs import JavaBigInteger, JavaFloat, JavaLong, JavaMap

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass
class Order:
    """The Python side of ``Order.java``."""

    id: int
    text: str
    price: float
    paid: bool
    total: Decimal
    placed: datetime
    tags: list[str]
    rank: int | None = None


def to_java(value: Any) -> Any:  # noqa: PLR0911, PLR0912  # one case for each class
    """Return a value in the form for Java: an int becomes the smallest class that holds it."""
    match value:
        case None | bool() | str():
            return value
        case JavaBigInteger():
            return {"integer": str(int(value))}
        case int():
            if -(2**31) <= value < 2**31 and not isinstance(value, JavaLong):
                return value
            return {"long": int(value)} if -(2**63) <= value < 2**63 else {"integer": str(value)}
        case JavaFloat():
            return {"float": repr(float(value))}
        case float():
            return (
                value
                if math.isfinite(value)
                else {"double": str(value).replace("inf", "Infinity").replace("nan", "NaN")}
            )
        case Decimal():
            return {"decimal": str(value)}
        case datetime():
            return {"date": (value - _EPOCH) // timedelta(milliseconds=1)}
        case UUID():
            return {"uuid": str(value)}
        case bytes():
            return {"bytes": base64.b64encode(value).decode()}
        case list():
            return [to_java(item) for item in value]
        case JavaMap():
            assert value.class_name == "java.util.HashMap"
            return {"hash map": {key: to_java(item) for key, item in value.items()}}
        case dict():
            return {"map": {key: to_java(item) for key, item in value.items()}}
        case Order():
            order = {field.name: to_java(getattr(value, field.name)) for field in fields(value)}
            return {"order": {**order, "id": {"long": value.id}}}
    raise TypeError(f"no Java class for {type(value).__name__}")


def from_java(line: Any) -> Any:  # noqa: PLR0911, PLR0912  # one case for each class
    """Return the value for which delayq's codecs write the bytes of exactly that Java class."""
    if isinstance(line, list):
        return [from_java(item) for item in line]
    if not isinstance(line, dict):
        return line
    ((kind, content),) = line.items()
    match kind:
        case "long":
            return JavaLong(content)
        case "integer":
            return JavaBigInteger(content)
        case "double":
            return float(content)
        case "float":
            return JavaFloat(content)
        case "decimal":
            return Decimal(content)
        case "date":
            return _EPOCH + timedelta(milliseconds=content)
        case "uuid":
            return UUID(content)
        case "bytes":
            return base64.b64decode(content)
        case "map":
            return {key: from_java(item) for key, item in content.items()}
        case "hash map":
            return JavaMap(
                "java.util.HashMap", {key: from_java(item) for key, item in content.items()}
            )
        case "order":
            order = {key: from_java(item) for key, item in content.items()}
            # The field's declaration says long.
            return Order(**{**order, "id": int(order["id"])})
    raise TypeError(f"no Python class for {kind}")
