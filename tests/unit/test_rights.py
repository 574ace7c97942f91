"""What a script's rights are checked against is what the script does."""

from __future__ import annotations

import pytest

from delayq._redis import reliable_scripts as reliable
from delayq._redis import scripts as delayed
from delayq._redis.rights import RIGHTS, is_refusal
from tests import lua

ALL = (*delayed.ALL, *reliable.ALL)
WRITING = "SET DEL UNLINK PEXPIRE PUBLISH ZADD ZREM ZREMRANGEBYRANK HSET HDEL LPUSH RPUSH LPOP RPOP LSET LREM"
# One command writes, and nothing comes after it but hints: refused or done.
WRITE_ONCE = {"delayed/extend", "delayed/reschedule", "delayed/purge", "reliable/resume"}


@pytest.mark.parametrize("script", ALL, ids=lambda script: script.name)
def test_every_command_of_a_script_that_writes_is_tried_first(script: delayed.Script) -> None:
    used = lua.commands(script)
    if script.name not in RIGHTS:
        assert script.name in WRITE_ONCE or not used & set(WRITING.split())
        return
    tried = {command.upper() for commands in RIGHTS[script.name].values() for command in commands.split()}
    # Announcements on Redisson's channel come before the first write, all others are hints. TIME has no key.
    assert tried == used - {"PUBLISH", "TIME"}


@pytest.mark.parametrize("script", ALL, ids=lambda script: script.name)
def test_every_key_of_a_script_that_writes_is_tried_first(script: delayed.Script) -> None:
    if script.name in RIGHTS:
        keys = {"live" if key.startswith("live_") else key for key in script.keys}
        assert keys >= set(RIGHTS[script.name])
        assert script.keys[0] not in ("fence", "call"), "a call's own key says nothing about the next call"


@pytest.mark.parametrize(
    "text",
    [
        "NOPERM this user has no permissions to run the 'lpop' command",
        "NOPERM No permissions to access a key",
        "ACL failure in script: No permissions to access a channel script: on @user_script:97.",
        "@user_script: 1: The user executing the script can't run this command or subcommand",
        "The user executing the script can't access at least one of the keys mentioned in the command arguments",
    ],
)
def test_a_missing_right_is_told_from_other_errors(text: str) -> None:
    assert is_refusal(text)
    assert not is_refusal("WRONGTYPE Operation against a key holding the wrong kind of value")
