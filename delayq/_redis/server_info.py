"""Questions about a server: its state, its cluster, and the rights of a user."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from delayq._redis.client import RedisClient

# Commands whose first argument is not a key, with arguments that work.
_WITHOUT_KEY: dict[str, tuple[str, ...]] = {
    "eval": ("return 1", "0"),
    "evalsha": ("0" * 40, "0"),
    "ping": (),
    "time": (),
    "asking": (),
    "role": (),
    "select": ("0",),
    "unsubscribe": (),
}
_WITH_CHANNEL = ("subscribe", "publish")


async def servers(client: RedisClient) -> list[dict[str, str]]:
    """Return the figures of every server, by name. Raises as :meth:`RedisClient.everywhere`."""
    return [read_info(reply) for reply in await client.everywhere("INFO")]


async def cluster(client: RedisClient) -> dict[str, str]:
    """Return the figures of the cluster, by name. Raises as :meth:`RedisClient.everywhere`."""
    return read_info((await client.everywhere("CLUSTER", "INFO"))[0])


def read_info(reply: bytes) -> dict[str, str]:
    """Parse such a reply."""
    lines = (
        line.partition(":")
        for line in reply.decode(errors="replace").splitlines()
        if line and not line.startswith("#")
    )
    return {name: value for name, _, value in lines}


async def user(client: RedisClient) -> str:
    """Return the name of the user. Raises as :meth:`RedisClient.anywhere` does."""
    name: bytes = await client.anywhere("ACL", "WHOAMI")
    return name.decode(errors="replace")


async def missing_rights(
    client: RedisClient, user: str, commands: Sequence[str], key: str, channel: str
) -> AsyncIterator[str]:
    """Yield the rights that a user lacks to run commands on a key or a channel, as ACL rules."""
    infos = await client.command("COMMAND", "INFO", *commands, key=key)
    for command, info in zip(commands, infos, strict=True):
        if not info:
            continue
        if command in _WITHOUT_KEY:
            arguments = list(_WITHOUT_KEY[command])
        else:
            arguments = [channel if command in _WITH_CHANNEL else key]
            arguments += ["1"] * (abs(int(info[1])) - 2)
        answer = await client.command("ACL", "DRYRUN", user, command, *arguments, key=key)
        if answer != b"OK":
            yield (
                f"+{command}"
                if b"command" in answer
                else f"~{key}"
                if b"key" in answer
                else f"&{channel}"
            )
