"""Two tasks on one queue, each with its own retries.

    export DELAYQ_URL=redis://127.0.0.1:6379/0
    python examples/tasks.py               # offers calls, makes them, and ends

    cd examples && delayq worker tasks:worker     # makes calls forever

A web application imports `welcome`, and opens `delayq.connect(tasks=[tasks])`. The mail server is
busy at first, so its mail takes a second attempt.
"""

import asyncio
import threading
from dataclasses import dataclass

import delayq
from delayq.tasks import INJECTED

tasks = delayq.Tasks("users")


@dataclass
class User:
    id: int
    address: str


class MailServer:
    """A dependency of the tasks."""

    def __init__(self) -> None:
        self.sent = 0

    async def send(self, address: str, subject: str) -> None:
        self.sent += 1
        if self.sent == 1:
            raise ConnectionError("the mail server is busy")
        print(f"sent {subject!r} to {address}", flush=True)


@tasks.task(max_attempts=5, backoff=delayq.Backoff.fixed(0.1), timeout=10)
async def welcome(user: User, subject: str = "Welcome", *, server: MailServer = INJECTED) -> None:
    await server.send(user.address, subject)
    await thumbnail.options(id=f"thumbnail-{user.id}").offer(user.id, width=200)


@tasks.task(max_attempts=1)
def thumbnail(user: int, width: int) -> None:  # a plain function runs in a thread
    print(f"thumbnail of user {user}, {width} wide", flush=True)
    made.set()


worker = delayq.Worker()  # on $DELAYQ_URL
made = threading.Event()


@worker.dependency(once=True)
def mail_server() -> MailServer:
    return MailServer()


worker.include(tasks, concurrency=10)


async def main() -> None:
    async with worker:  # binds the tasks to its client
        await welcome.options(delay=0.2).offer(User(7, "ada@example.org"), subject="Hello")
        await asyncio.to_thread(made.wait)


if __name__ == "__main__":
    asyncio.run(main())
