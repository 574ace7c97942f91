"""Questions about a server rather than about a queue: its state, its cluster, and the rights of a user."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from delayq._redis.client import RedisClient


async def info(client: RedisClient) -> list[dict[str, str]]:
    """Return the ``INFO`` of each server that has keys and is up, as values by name. Raises as :meth:`RedisClient.everywhere`."""
    return [read_info(reply.decode(errors="replace")) for reply in await client.everywhere("INFO")]


async def cluster_info(client: RedisClient) -> dict[str, str]:
    """Return the state of the cluster as one of its servers sees it. Raises as :meth:`RedisClient.everywhere`.

    A single server that is not in a cluster refuses the question.
    """
    reply, *_ = await client.everywhere("CLUSTER", "INFO")
    return read_info(reply.decode(errors="replace"))


def read_info(text: str) -> dict[str, str]:
    """Parse the reply to ``INFO`` into values by name."""
    lines = (line.partition(":") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: value for name, _, value in lines}


async def user_name(client: RedisClient) -> str:
    """Return the name of the user under which the client is connected. Raises as :meth:`RedisClient.run`."""
    reply: bytes = await client.command("ACL", "WHOAMI", key="")
    return reply.decode(errors="replace")


async def arities(client: RedisClient, commands: Sequence[str], key: str) -> dict[str, int]:
    """Return how many words each command takes at least, its name included; without those that the server does not know.

    Raises as :meth:`RedisClient.run`.

    Args:
        client: Asks.
        commands: The commands.
        key: Asks the server that has this key.
    """
    infos = await client.command("COMMAND", "INFO", *commands, key=key)
    return {command: abs(int(facts[1])) for command, facts in zip(commands, infos, strict=True) if facts}


async def refusal(client: RedisClient, user: str, command: Sequence[str], key: str) -> str:
    """Return why a user may not run a command; empty if it may. Needs Redis 7 or Valkey. Raises as :meth:`RedisClient.run`.

    Args:
        client: Asks.
        user: The user.
        command: The command and its arguments.
        key: Asks the server that has this key.
    """
    reply: bytes = await client.command("ACL", "DRYRUN", user, *command, key=key)
    return "" if reply == b"OK" else reply.decode(errors="replace")
