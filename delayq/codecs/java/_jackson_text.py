"""Single values as Jackson writes them in JSON text.

Observed in Jackson 2.19 under Redisson 4.7.0 and 3.20.1, on Java 17 and 25.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from delayq.codecs.java._limits import to_float

if TYPE_CHECKING:
    from decimal import Decimal

# The longest number that Jackson reads (StreamReadConstraints.maxNumberLength).
LONGEST_NUMBER = 1000

# Characters below U+0020, the quote and the backslash must be escaped. Jackson also escapes
# surrogates: pairs, because it combines them into four bytes only when asked
# (JsonWriteFeature.COMBINE_UNICODE_SURROGATES_IN_UTF8), and lone ones alike. Everything else goes
# out as UTF-8, including `/`, DEL and U+2028.
_TO_ESCAPE = re.compile('[\x00-\x1f"\\\\\ud800-\udfff\U00010000-\U0010ffff]')
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_has_to_escape = _TO_ESCAPE.search
_SHORT = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def quote(text: str) -> str:
    """Return ``text`` as a JSON string."""
    # Concatenated, not formatted: a str with methods of its own, such as an enum's, is written as
    # the text that it is.
    return '"' + (_TO_ESCAPE.sub(_escape, text) if _has_to_escape(text) else text) + '"'


def has_lone_surrogate(text: str) -> bool:
    """Tell whether ``text`` contains half of a surrogate pair, so that it is not valid Unicode."""
    return _LONE_SURROGATE.search(text) is not None


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    if short := _SHORT.get(character):
        return short
    units = character.encode("utf-16-be", "surrogatepass").hex().upper()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))


def whole(value: int) -> str | None:
    """Return an int's digits, or None if there are more than Jackson would read."""
    if -(2**63) <= value < 2**63:
        return int.__repr__(value)
    # The bits are counted first, because Python takes quadratic time for the digits, or refuses.
    if value.bit_length() > 4 * LONGEST_NUMBER:
        return None
    digits = int.__repr__(value)
    return digits if len(digits.lstrip("-")) <= LONGEST_NUMBER else None


def decimal(value: Decimal) -> str | None:
    """Write a BigDecimal without exponent, or return None if Java has none or would not read it."""
    if (
        not value.is_finite()
        or max(abs(value.adjusted()), len(value.as_tuple().digits)) > LONGEST_NUMBER
    ):
        return None
    text = format(value, "f")
    # A BigDecimal has no negative zero.
    text = text if value else text.lstrip("-")
    return text if len(text) <= LONGEST_NUMBER else None


def double(value: float) -> str:
    """Write a double as Java's ``Double.toString`` does since JDK 19: the fewest digits that read
    back as the same double.

    Those are Python's digits, but at least two; of all forms with two, the closest. So 4.9E-324,
    where Python writes 5e-324. Before JDK 19, Java sometimes wrote more digits than needed: 2.0E23
    as 1.9999999999999998E23.
    """
    # In this range neither writes an exponent, and both write the same text.
    if 1e-3 <= value < 1e7 or -1e7 < value <= -1e-3:
        return float.__repr__(value)
    if not math.isfinite(value):
        return _not_finite(value)
    text = float.__repr__(abs(value))
    if len(_digits(text)[0]) == 1:
        two = f"{abs(value):.1e}"
        # Just above a power of two the rounding interval is lopsided, so the closest one could lie
        # outside it. It never has.
        text = two if float(two) == abs(value) else text
    return _java_form(value, text)


def single(value: float) -> str:
    """Write a 32-bit float as Java's ``Float.toString`` does since JDK 19."""
    if not math.isfinite(value):
        return _not_finite(value)
    wanted = abs(to_float(value))
    # Nine digits are enough for any float.
    text = next(text for digits in range(1, 9) if _reads_as(text := f"{wanted:.{digits}e}", wanted))
    return _java_form(value, text)


def _reads_as(text: str, wanted: float) -> bool:
    try:
        return to_float(float(text)) == wanted
    except OverflowError:
        return False


def _not_finite(value: float) -> str:
    # JsonWriteFeature.WRITE_NAN_AS_STRINGS is on unless switched off.
    return '"NaN"' if math.isnan(value) else '"Infinity"' if value > 0 else '"-Infinity"'


def _digits(text: str) -> tuple[str, int]:
    """Return the significant digits of a number, and the power of ten of the first one."""
    mantissa, _, exponent = text.partition("e")
    before, _, after = mantissa.partition(".")
    digits = (before + after).lstrip("0")
    power = int(exponent or 0) + (
        len(before) - 1 if before.strip("0") else len(digits) - len(after) - 1
    )
    return digits.rstrip("0"), power


def _java_form(value: float, text: str) -> str:
    """Write without exponent from 10**-3 up to 10**7; always with digits around the point."""
    sign = "-" if math.copysign(1, value) < 0 else ""
    digits, power = _digits(text)
    if not digits:
        return f"{sign}0.0"
    if -3 <= power < 0:
        return f"{sign}0.{'0' * (-power - 1)}{digits}"
    if 0 <= power < 7:
        return f"{sign}{digits[: power + 1].ljust(power + 1, '0')}.{digits[power + 1 :] or '0'}"
    return f"{sign}{digits[0]}.{digits[1:] or '0'}E{power}"
