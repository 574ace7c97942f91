"""The settings of a reliable queue, without a server: who declares which, and who wins."""

from __future__ import annotations

import dataclasses
import inspect
import re
from datetime import timedelta
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import delayq
from delayq._dashboard.pages.settings import FIELDS
from delayq._reliable.replies import ClaimReply
from delayq._reliable.settings import (
    DEFAULTS,
    FORMATS,
    HASH_FIELDS,
    LAYOUT,
    UNDECLARED,
    HandleSettings,
    Policy,
    QueueOptions,
    StoredSettings,
    setting_texts,
)
from delayq.cli.settings import configure

DOCS = Path(__file__).parents[3] / "docs"


def test_settings_of_a_handle_are_declared_as_the_server_stores_them() -> None:
    HandleSettings().check()
    assert HandleSettings().declared() == {}
    periods = dict.fromkeys(("dedup_window", "keep", "keep_dead"), timedelta(minutes=1))
    numbers = {"partitions": 8, "max_size": 1000, "max_kept": 9, "max_dead": 10}
    settings = HandleSettings(expired="dead", **periods, **numbers)  # type: ignore[arg-type]
    assert settings.declared() == {
        "expired": "dead",
        **dict.fromkeys(periods, "60000000"),
        **{name: str(number) for name, number in numbers.items()},
    }


def test_a_limit_of_none_overrides_the_inherited_one() -> None:
    assert HandleSettings(max_size=None).declared() == {"max_size": "0"}
    assert HandleSettings(max_attempts=None, lease=None).options == {"max_attempts": None}
    limits = HandleSettings(keep_dead=None, max_dead=None).declared()
    assert limits == {"keep_dead": "0", "max_dead": "0"}
    assert HandleSettings(max_attempts=None).inherit(DEFAULTS).policy() == Policy(30_000_000, 0)


def test_a_handle_inherits_what_it_leaves_out_and_of_its_own_settings_only() -> None:
    other = HandleSettings(lease=60, max_attempts=3, max_size=5, dedup_window=1)
    settings = HandleSettings(lease=5).inherit(other).inherit(DEFAULTS)
    assert settings.options == {**DEFAULTS.options, "lease": 5, "max_attempts": 3}
    assert settings.declared() == {}
    assert settings.policy() == Policy(5_000_000, 3)


def test_stored_settings_are_read_and_what_is_not_stored_is_the_default() -> None:
    stored = StoredSettings({})
    assert (stored.has_partition_count, stored.epoch) == (False, UNDECLARED)
    assert stored.public() == delayq.QueueSettings(1, None, "drop", 0.0)
    values = (b"1", b"17", b"me 5", None, b"16?", b"1000", b"dead", b"1500000", b"2500000", b"9")
    stored = StoredSettings.of((*values, b"3500000", b"8", b"c5", b"r9p500000o"))
    assert (stored.has_partition_count, stored.refuses_offers) == (True, True)
    assert (stored.epoch, stored.partitions) == ("17", 16)
    assert stored.public() == delayq.QueueSettings(
        *(16, 1000, "dead", 1.5, 2.5, 9, 3.5, 8),
        delayq.Limit(concurrency=5),
        delayq.Limit(rate=9, per=0.5, ordered=True),
    )


@given(
    st.lists(
        st.none() | st.binary(max_size=12), min_size=len(HASH_FIELDS), max_size=len(HASH_FIELDS)
    )
)
def test_settings_of_other_programs_are_read_within_bounds(values: list[bytes | None]) -> None:
    stored = StoredSettings.of(values)
    public = stored.public()
    assert 1 <= public.partitions <= 1024
    assert stored.has_partition_count or stored.partitions == 1
    assert public.max_size is None or public.max_size > 0
    assert public.dedup_window >= 0
    assert public.keep_dead is None or public.keep_dead > 0
    assert public.max_dead is None or public.max_dead > 0
    assert public.keep >= 0
    assert public.max_kept > 0


def test_a_difference_tells_both_values_and_the_command_that_ends_it() -> None:
    values = (b"1", b"1", b"", None, b"4", b"0", b"drop", b"1500000", b"0", b"7", b"60000000", b"5")
    stored = StoredSettings.of((*values, *(None,) * (len(HASH_FIELDS) - len(values))))
    limit = delayq.Limit(5, 100, 600)
    assert stored.differences(setting_texts(max_size=None, limit=limit, expired="drop")) == []
    for declared, text, option in (
        (
            setting_texts(max_size=5),
            "max_size is None on the server, and 5 in the code",
            "max-size 5",
        ),
        (setting_texts(max_dead=None), "max_dead is 7 on the server, and None in", "max-dead none"),
        (
            setting_texts(expired="dead"),
            "expired is 'drop' on the server, and 'dead'",
            "expired dead",
        ),
        (
            setting_texts(dedup_window=0),
            "dedup_window is 1.5 on the server, and 0",
            "dedup-window none",
        ),
        (
            setting_texts(keep=604800.25),
            "keep is 60 on the server, and 604800.25",
            "keep 604800.25",
        ),
        (
            setting_texts(keep_dead=timedelta(days=1)),
            "is None on the server, and 86400",
            "keep-dead 86400",
        ),
        (setting_texts(max_kept=9), "max_kept is 5 on the server, and 9", "max-kept 9"),
    ):
        (difference,) = stored.differences(declared)
        assert text in difference.text
        assert difference.command("my jobs") == f"delayq configure 'my jobs' --{option}"
    (difference,) = StoredSettings({"limit": "c2"}).differences(setting_texts(limit=limit))
    assert difference.command("jobs") == "delayq configure jobs --limit 5,100/600s"
    assert (
        stored.differences(setting_texts(partitions=8))[0].command("a")
        == "delayq repartition a --to 8"
    )
    with pytest.raises(delayq.ConfigurationError, match="delayq repartition 'my jobs' --to 8"):
        stored.check_partitions("my jobs", setting_texts(partitions=8))


def test_the_scripts_know_the_same_layout_and_fields() -> None:
    include = files("delayq") / "lua" / "reliable" / "include"
    assert f"local LAYOUT = '{LAYOUT}'" in (include / "settings.lua").read_text("utf-8")
    change = (include / "change.lua").read_text("utf-8")
    fields = re.search(r"local FIELDS = \{(.*?)\}", change, re.DOTALL)
    assert fields is not None
    assert tuple(re.findall(r"'(\w+)'", fields[1])) == HASH_FIELDS


def test_the_script_that_claims_names_the_values_of_its_reply() -> None:
    script = (files("delayq") / "lua" / "reliable" / "claim.lua").read_text("utf-8")
    reply = script.partition("-- Returns these values")[2].partition("\n-- An error")[0]
    assert tuple(re.findall(r"^--   (\w+)", reply, re.MULTILINE)) == ClaimReply._fields


def test_every_setting_of_a_queue_can_be_seen_and_changed_everywhere() -> None:
    assert set(FORMATS) == {field.name for field in dataclasses.fields(delayq.QueueSettings)}
    assert set(FORMATS) == set(QueueOptions.__annotations__) == set(FIELDS)
    assert set(FORMATS) <= set(inspect.signature(configure).parameters)
    arguments = inspect.getdoc(delayq.Client.reliable_queue) or ""
    keys, guide = ((DOCS / page).read_text("utf-8") for page in ("redis-data-model.md", "howto.md"))
    for name in FORMATS:
        assert f"\n    {name}: " in arguments, name
        assert f"\n| `{name}` |" in keys, name
        assert f"`{name}`" in guide, name
