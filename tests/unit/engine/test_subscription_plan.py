"""Which channels a client asks for: :class:`~delayq._engine.subscription_plan.SubscriptionPlan`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from delayq._engine.subscription_plan import SubscriptionPlan

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from delayq._engine.subscription_plan import Command

FORBIDDEN = "NOPERM this user has no permissions to access one of the channels used as arguments"


class Desk:
    """A plan, and a server that permits some channels."""

    def __init__(self) -> None:
        self.plan = SubscriptionPlan()
        self.now = 0.0
        self.subscribed: set[str] = set()
        self.reported: list[str] = []

    def want(self, *channels: str) -> None:
        for channel in channels:
            self.plan.add(channel)

    def send(self) -> list[Command]:
        return self.plan.commands(self.now)

    def reply(self, commands: Iterable[Command], forbidden: Collection[str] = ()) -> None:
        for kind, channels in commands:
            if kind == "subscribe" and not {*channels}.isdisjoint(forbidden):
                assert self.plan.on_refusal(FORBIDDEN, self.now)
            else:
                change = self.subscribed.add if kind == "subscribe" else self.subscribed.discard
                for channel in channels:
                    change(channel)
                    self.plan.on_confirmation(channel)
            self.reported += self.plan.report_forbidden()

    def settle(self, forbidden: Collection[str] = ()) -> int:
        """Send and answer until nothing is left to send, and return the number of commands."""
        count = 0
        while commands := self.send():
            count += len(commands)
            self.reply(commands, forbidden)
        return count


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_channels_that_are_added_together_are_requested_together_and_once(desk: Desk) -> None:
    desk.want("b", "gone", "a")
    desk.plan.remove("gone")
    assert desk.send() == [("subscribe", ["a", "b"])]
    assert desk.send() == []
    desk.want("c")
    assert desk.send() == [("subscribe", ["c"])]
    # A new connection subscribes to everything again.
    desk.plan.begin()
    assert desk.send() == [("subscribe", ["a", "b", "c"])]
    desk.plan.remove("a")
    assert desk.send() == [("unsubscribe", ["a"])]


def test_a_command_names_a_bounded_number_of_channels(desk: Desk) -> None:
    desk.want(*map(str, range(1201)))
    commands = desk.send()
    assert [len(channels) for _, channels in commands] == [500, 500, 201]
    desk.reply(commands)
    assert len(desk.subscribed) == 1201


def test_forbidden_channels_are_tried_again_a_minute_later_each_by_itself(desk: Desk) -> None:
    desk.want("a", "b", "c", "gone")
    assert desk.plan.retry_at == math.inf
    desk.settle({"a", "c", "gone"})
    desk.plan.remove("gone")
    assert desk.plan.retry_at == 60
    desk.now = 59.9
    assert desk.send() == []
    desk.now = 60.0
    again = desk.send()
    assert again == [("subscribe", ["a"]), ("subscribe", ["c"])]
    desk.reply(again, {"c"})
    assert desk.subscribed == {"a", "b"}
    assert desk.plan.retry_at == 120
    desk.now = 120.0
    desk.settle()
    assert desk.subscribed == {"a", "b", "c"}
    assert desk.plan.retry_at == math.inf


def test_a_reply_answers_the_oldest_command(desk: Desk) -> None:
    desk.plan.ping()
    desk.want("a")
    desk.send()
    desk.plan.on_pong()
    desk.plan.ping()
    desk.want("b")
    desk.send()
    assert desk.plan.on_refusal(FORBIDDEN, 0.0)
    # A user may lack the right to send a PING: its reply still shows that the server is there.
    assert desk.plan.on_refusal(
        "NOPERM this user has no permissions to run the 'ping' command", 0.0
    )
    desk.plan.on_confirmation("b")
    assert desk.plan.report_forbidden() == ["a"]


def test_any_other_error_ends_the_connection(desk: Desk) -> None:
    assert not desk.plan.on_refusal(FORBIDDEN, 0.0), "no command is in flight"
    desk.want("a")
    desk.send()
    assert not desk.plan.on_refusal("max number of clients reached", 0.0)
