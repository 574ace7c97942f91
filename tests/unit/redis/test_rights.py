"""The commands that a script needs permission for, as the client finds them in its text."""

from __future__ import annotations

from collections import OrderedDict

from delayq._redis.rights import Rights, checked, commands, commands_tried, is_refusal
from delayq._redisson import store as delayed
from delayq._reliable import scripts as reliable
from tests.support import lua


def test_a_script_that_writes_tries_all_of_its_commands_first() -> None:
    for script in lua.SCRIPTS:
        used, form = commands(script), checked(script)
        if used & lua.WRITING <= {"UNLINK", "DEL", "RENAME"}:
            # The script only reads, or nothing follows its one write.
            assert form is None, script.name
            continue
        assert commands_tried(script) >= used - {"PUBLISH", "PUBSUB"}, script.name
        assert form is not None
        assert form.text.endswith(script.text), script.name
        assert all(f"redis.pcall('{command}'" in form.text for command in commands_tried(script))


def test_a_script_that_takes_also_tries_the_commands_that_give_back() -> None:
    for taking in (delayed.TRANSFER, delayed.POLL_PENDING):
        for following in (delayed.GIVE_BACK, delayed.SET_ASIDE):
            assert commands_tried(taking) >= commands(following) - {"PUBLISH"}
    assert commands_tried(reliable.CLAIM) >= commands(reliable.RELEASE) - {"PUBLISH"}


MISSING = """
NOPERM this user has no permissions to run the 'lpop' command
NOPERM No permissions to access a key
ACL failure in script: No permissions to access a channel script: on @user_script:97.
@user_script: 1: The user executing the script can't run this command or subcommand
The user executing the script can't access at least one of the keys mentioned in the arguments
"""


def test_a_missing_right_is_told_from_other_errors() -> None:
    for text in MISSING.strip().splitlines():
        assert is_refusal(text), text
    assert not is_refusal("WRONGTYPE Operation against a key holding the wrong kind of value")


class Wire:
    """Stands for a connection, which rights are remembered for."""

    def __init__(self) -> None:
        self.permits: OrderedDict[tuple[str, str], float] = OrderedDict()


def test_checks_are_forgotten_when_they_no_longer_count() -> None:
    now = 0.0
    rights, wire, script = Rights(lambda: now), Wire(), reliable.CLAIM
    form = checked(script)
    assert form is not None
    for queue in range(1000):
        now += 0.1
        rights.permitted(wire, script, "first", form)  # type: ignore[arg-type]
        rights.permitted(wire, script, f"queue {queue}", form)  # type: ignore[arg-type]
    assert rights.form(wire, script, "first") is script  # type: ignore[arg-type]
    assert rights.form(wire, script, "queue 999") is script  # type: ignore[arg-type]
    assert rights.form(wire, script, "queue 900") is form  # type: ignore[arg-type]
    assert len(wire.permits) <= 52
