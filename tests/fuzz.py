"""Fuzz every reader of foreign bytes, guided by coverage: ``python -m tests.fuzz --seconds 60``, or
``make fuzz``.

Needs atheris, which is available for Linux and CPython 3.11 to 3.13. Each target takes arbitrary
bytes. It may raise only the error that is meant for unreadable input, and that error must not
reveal a password. `tests/unit/test_fuzz.py` checks the same with hypothesis.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import atheris

with atheris.instrument_imports(include=["delayq"]):
    from delayq import ConfigurationError, DecodeError, codecs
    from delayq._delayed.records import payload_of
    from delayq._engine import stagger
    from delayq._redis.url import from_url
    from delayq._reliable.bodies import parse, parse_letter
    from delayq._reliable.recurrence import Unreadable, read
    from delayq._reliable.schedules import to_schedule
    from delayq.codecs import codec_for

if TYPE_CHECKING:
    from collections.abc import Callable

SECRET = "hunter2"


def decoding(codec: Any) -> Callable[[bytes], object]:
    def decode(data: bytes) -> None:
        with suppress(DecodeError):
            codec.decode(data)

    return decode


def bodies(data: bytes) -> None:
    for function in (parse, parse_letter):
        with suppress(ValueError):
            function(data)


def schedules(data: bytes) -> None:
    with suppress(Unreadable):
        read(data)
        to_schedule("name", data, 0)


def addresses(data: bytes) -> None:
    text = data.decode("latin-1")
    for url in (
        text,
        f"redis://me:{SECRET}{text}",
        f"redis+cluster://me:{text}{SECRET}@h",
        f"unix://{text}:{SECRET}@/s",
    ):
        try:
            shown = repr(from_url(url))
        except ConfigurationError as error:
            shown = str(error)
        # After the @, or in an address without one, the secret may be a host or a path.
        if SECRET in shown and url is not text and "@" not in text and "/" not in text:
            raise AssertionError(f"{url!r} is shown as {shown}")


CODECS = {
    name: getattr(codecs, name)()
    for name in codecs.__all__
    if name.endswith("Codec") and name != "Codec"
}
TARGETS: dict[str, Callable[[bytes], object]] = {
    "records": payload_of,
    "bodies": bodies,
    "notices": stagger.parse,
    "schedules": schedules,
    "addresses": addresses,
    "list[int]": decoding(codec_for(list[int])),
    **{name: decoding(codec) for name, codec in CODECS.items()},
}


def all_targets(data: bytes) -> None:
    """Feed the data to the target that its first byte selects."""
    if data:
        [*TARGETS.values()][data[0] % len(TARGETS)](data[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument(
        "--target", choices=[*TARGETS], help="only this one; all by turns if not given"
    )
    parser.add_argument("--replay", help="a file that made it fail")
    options = parser.parse_args()
    target = TARGETS[options.target] if options.target else all_targets
    with tempfile.TemporaryDirectory() as corpus:
        arguments = (
            [options.replay]
            if options.replay
            else [corpus, f"-max_total_time={options.seconds}", "-max_len=512"]
        )
        atheris.Setup([sys.argv[0], *arguments], target)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
