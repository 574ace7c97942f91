"""Java reads the values that docs/codecs.md recommends for declared fields, and writes the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from delayq.codecs import BytesCodec
from tests.interop import report
from tests.interop.declared import codec, declared_object, field_of, mistakes, table
from tests.interop.settings import with_each_release

if TYPE_CHECKING:
    import delayq
    from tests.interop.redisson import Redisson

pytestmark = pytest.mark.java


@with_each_release
async def test_java_reads_each_line_of_the_table_and_sends_it_back(
    client: delayq.Client, redisson: Redisson, name: str
) -> None:
    with_class = redisson.release.writes_uuids_with_class
    ours, lines = codec(uuid_with_class=with_class), table(uuid_with_class=with_class)
    assert len(lines) > 60
    assert [ours.encode(declared_object(line.text, line.value)) for line in lines] == [
        line.payload for line in lines
    ]

    java = await redisson.open(name, "JsonJacksonCodec", attached=False)
    await redisson.open(f"{name}-back", "JsonJacksonCodec", attached=False)
    await client.delayed_queue(name, codec=ours).offer_many(
        [(declared_object(line.text, line.value), 0) for line in lines]
    )
    assert await java.ask("ready.pass", other=f"{name}-back", count=len(lines)) == [None] * len(
        lines
    )

    payloads = await client.delayed_queue(f"{name}-back", codec=BytesCodec()).drain()
    assert payloads == [line.payload for line in lines]
    values = [
        ours.decode(payload)[field_of(line.text)]
        for line, payload in zip(lines, payloads, strict=True)
    ]
    assert values == [line.back for line in lines]
    assert list(map(type, values)) == [type(line.back) for line in lines]
    report.NOTES.append(
        f"{redisson}: {len(lines)} declarations of docs/codecs.md, to Java and back in the same"
        " bytes"
    )


@with_each_release
async def test_java_loses_what_is_written_in_another_form(
    client: delayq.Client, redisson: Redisson, name: str
) -> None:
    with_class = redisson.release.writes_uuids_with_class
    wrong = mistakes(uuid_with_class=with_class)
    java = await redisson.open(name, "JsonJacksonCodec", attached=False)
    await redisson.open(f"{name}-back", "JsonJacksonCodec", attached=False)
    queue = client.delayed_queue(name, codec=codec(uuid_with_class=with_class))
    await queue.offer_many([(declared_object(text, value), 0) for text, value in wrong])
    errors = await java.ask("ready.pass", other=f"{name}-back", count=len(wrong))
    assert [text for (text, _), error in zip(wrong, errors, strict=True) if error is None] == []
    assert await client.delayed_queue(f"{name}-back", codec=BytesCodec()).drain() == []
