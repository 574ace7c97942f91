"""Java's types, where Python has no type of its own for them.

A value read from Java has one of these types only where plain Python would lose something, so that
encoding it again gives the same bytes: Redisson finds an element by its bytes (``contains``,
``remove``). Except for :class:`JavaValue`, each one can be used as the type that it is derived
from, and equals a value of it: a :class:`JavaLong` is an ``int``, a :class:`JavaList` a ``list``.

Class names are only ever compared and written. Nothing is imported or built because a payload names
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class JavaInt(int):
    """An ``int`` that Java holds in a type other than ``Integer``. Use a subclass."""

    class_name: ClassVar[str]
    """The Java class."""
    bits: ClassVar[int | None] = None
    """The number of bits, sign included, or None if it is unlimited."""


class JavaLong(JavaInt):
    """A ``java.lang.Long``, however small. A plain int of up to 32 bits becomes an ``Integer``."""

    class_name: ClassVar[str] = "java.lang.Long"
    bits: ClassVar[int | None] = 64


class JavaShort(JavaInt):
    """A ``java.lang.Short``: -2**15 to 2**15 - 1."""

    class_name: ClassVar[str] = "java.lang.Short"
    bits: ClassVar[int | None] = 16


class JavaByte(JavaInt):
    """A ``java.lang.Byte``: -128 to 127."""

    class_name: ClassVar[str] = "java.lang.Byte"
    bits: ClassVar[int | None] = 8


class JavaBigInteger(JavaInt):
    """A ``java.math.BigInteger``, however small. A plain int becomes one only past 64 bits."""

    class_name: ClassVar[str] = "java.math.BigInteger"


class JavaDouble(float):
    """A ``float`` that keeps the JSON text from which it was read.

    Decoding makes one where delayq would write the number differently: before JDK 19 Java gives
    some doubles more digits than they need, and the ``1.50`` of a BigDecimal looks like a double
    where JSON names no class.

    Attributes:
        text: The number as written in JSON.
    """

    text: str | None

    def __new__(cls, value: float, text: str | None = None) -> Self:
        number = super().__new__(cls, value)
        number.text = text
        return number

    def __getnewargs__(self) -> tuple[Any, ...]:
        # For copy and pickle: a float's own method returns a single argument.
        return float(self), self.text


class JavaFloat(JavaDouble):
    """A ``java.lang.Float``, of 32 bits. A plain float becomes a ``Double``."""


class JavaChar(str):
    """A ``java.lang.Character``: one UTF-16 unit."""

    __slots__ = ()


class JavaList(list[Any]):
    """A Java collection or array of a class other than ``java.util.ArrayList``, including sets, in
    Java's order.

    Attributes:
        class_name: The Java class, such as ``java.util.LinkedList`` or ``[Ljava.lang.String;``. If
            None, it is written without a class, as Jackson does for ``String[]`` and ``List.of()``;
            Redisson cannot read that back.
    """

    class_name: str | None

    def __init__(self, class_name: str | None, items: Iterable[Any] = ()) -> None:
        super().__init__(items)
        self.class_name = class_name

    def __repr__(self) -> str:
        return f"JavaList({self.class_name!r}, {super().__repr__()})"


class JavaMap(dict[Any, Any]):
    """A Java map of a class other than the codec's own.

    Attributes:
        class_name: The Java class, such as ``java.util.TreeMap``. If None, it is written without a
            class, as Jackson does for a record, or an object of another final class, in a field
            that is declared with that class. An int in it is plain, however large. Jackson does the
            same for a ``Map.of()`` that stands alone; Redisson cannot read that back.
    """

    class_name: str | None

    def __init__(
        self, class_name: str | None, items: Mapping[Any, Any] | Iterable[tuple[Any, Any]] = ()
    ) -> None:
        super().__init__(items)
        self.class_name = class_name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.class_name!r}, {super().__repr__()})"


class JavaObject(JavaMap):
    """An object of a Java class, as a dict of its fields.

    The fields are written as they are, including those that are None. Put them in the order in
    which Java writes them (by name, except that the constructor's parameters come first), and leave
    out nulls. An ``int`` is written plain, as Java writes an ``int`` and a ``long``; a field
    declared as ``Long`` or ``Object`` needs a :class:`JavaLong`.

    Attributes:
        class_name: The Java class, such as ``shop.Order`` or, for a nested one,
            ``shop.Shop$Order``.
        with_class: The fields whose enum is written as ``[class, name]``, and not as the name
            alone. Decoding lists the fields that it has read in that form.
    """

    with_class: frozenset[str]

    def __init__(
        self,
        class_name: str | None,
        items: Mapping[Any, Any] | Iterable[tuple[Any, Any]] = (),
        *,
        with_class: Iterable[str] = (),
    ) -> None:
        super().__init__(class_name, items)
        self.with_class = frozenset(with_class)


@dataclass(frozen=True, slots=True)
class JavaValue:
    """A value of a Java class that has no counterpart in Python: Jackson writes it as
    ``[class_name, value]``.

    Decoding makes one of every value for which Python has no type: an AtomicLong, a Timestamp, an
    enum that the codec's ``types`` do not name. It encodes to the same bytes again. To write such a
    value, make one yourself: ``JavaValue("shop.Status", "SENT")``.

    Attributes:
        class_name: The Java class.
        value: The value that Jackson writes for it, mostly text or a number.
    """

    class_name: str
    value: Any


def fits(value: int, bits: int | None) -> bool:
    """Return whether ``value`` fits into ``bits`` bits, sign included; None: any number of bits."""
    # `~value` is -value - 1: the negative side reaches one further.
    return bits is None or max(value, ~value) < 1 << bits - 1


def is_char(text: str) -> bool:
    """Return whether ``text`` is one UTF-16 unit."""
    return len(text) == 1 and text <= "\uffff"


def to_ms(moment: datetime) -> int:
    """Return milliseconds since the epoch, cutting off anything finer towards the past."""
    return (moment - _EPOCH) // timedelta(milliseconds=1)


def from_ms(milliseconds: int) -> datetime:
    """Return the moment in UTC, or raise OverflowError outside of the years 1 to 9999."""
    return _EPOCH + timedelta(milliseconds=milliseconds)
