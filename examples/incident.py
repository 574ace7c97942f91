"""Four things that go wrong in production, to find and fix from the command line.

    export DELAYQ_URL=embedded:./example-data
    python examples/incident.py            # goes on until Ctrl-C

The way through it is in docs/operations.md. Nothing is in the queues at first; afterwards:

- `mails` has messages that are due, and no worker
- `invoices` has a poison message, which fails in every attempt
- `exports` has a tenant whose messages take long, so another one waits
- `webhooks` has had a wave of dead letters, of two kinds of errors
"""

import asyncio
import logging

import delayq

RETRIES = delayq.Backoff.fixed(3)

mailer = delayq.Worker()  # on $DELAYQ_URL; this program does not run it
others = delayq.Worker()
shop_is_down = True


@mailer.listener("mails")
async def mail(value: dict[str, str]) -> None:
    print("mailed", value["to"], flush=True)


@others.listener("invoices", max_attempts=10_000, backoff=RETRIES)
async def invoice(value: dict[str, str]) -> None:
    float(value["amount"])


@others.listener("exports", concurrency=4)
async def export(value: dict[str, str]) -> None:
    await asyncio.sleep(600 if value["tenant"] == "acme" else 0.01)


@others.listener("webhooks", max_attempts=1)
async def webhook(value: dict[str, str]) -> None:
    url = value["url"]
    if shop_is_down and "shop" in url:
        raise ConnectionError("shop.example.org does not answer")


async def wait_for_count(
    queue: delayq.ReliableQueue[dict[str, str]], state: str, count: int
) -> None:
    """Wait until the server has this number of messages in a state."""
    while getattr(await queue.stats(), state) != count:  # noqa: ASYNC110 - only the server knows
        await asyncio.sleep(0.1)


async def break_things(client: delayq.Client) -> None:
    """Offer all messages, and wait until they have done their harm."""
    mails = client.reliable_queue("mails")
    addresses = [{"to": f"user-{number}@example.org"} for number in range(60)]
    await mails.offer_many([delayq.Offer(address) for address in addresses])

    invoices = client.reliable_queue("invoices")
    for number, amount in enumerate(["10.00", "12,50", "7.90"], start=1):
        await invoices.offer({"amount": amount}, id=f"invoice-{number}")

    exports = client.reliable_queue("exports")
    await exports.offer_many(
        [
            delayq.Offer({"tenant": "acme"}, id=f"acme-{number}", group="acme")
            for number in range(200)
        ]
    )
    # The worker also gives back what it has claimed ahead.
    await wait_for_count(exports, "leased", 4)
    await exports.offer({"tenant": "bob"}, id="bob-0", group="bob")

    webhooks = client.reliable_queue("webhooks")
    url = "https://shop.example.org/paid"
    await webhooks.offer_many([delayq.Offer({"url": url}) for _ in range(28)])
    # Misspelt by a producer.
    await webhooks.offer_many([delayq.Offer({"uri": url}) for _ in range(12)])
    await wait_for_count(webhooks, "dead", 40)
    await wait_for_count(exports, "leased", 4)


async def main() -> None:
    global shop_is_down  # noqa: PLW0603 - the state of the world outside
    # The log would tell what is wrong. Here, the command line shall.
    logging.getLogger("delayq").setLevel(logging.CRITICAL)
    async with others:
        await break_things(others.client)
        shop_is_down = False
        print("everything is broken now; press Ctrl-C to end it", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        print("ended")
