"""The orders, in a SQLite file that the app and the consumer share: ``$ORDERS_DB``, by default
``orders.db``.
"""

import os
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from enum import StrEnum

from pydantic import BaseModel


class State(StrEnum):
    UNPAID = "unpaid"
    PAID = "paid"
    CLOSED = "closed"


class NewOrder(BaseModel):
    item: str


class Order(NewOrder):
    id: str
    state: State


@contextmanager
def _database() -> Iterator[sqlite3.Connection]:
    with (
        closing(sqlite3.connect(os.environ.get("ORDERS_DB", "orders.db"))) as connection,
        connection,
    ):
        connection.execute(
            "CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY, item TEXT, state TEXT)"
        )
        yield connection


def draft(new: NewOrder) -> Order:
    return Order(id=uuid.uuid4().hex, item=new.item, state=State.UNPAID)


def save(order: Order) -> None:
    with _database() as connection:
        connection.execute(
            "INSERT INTO orders VALUES (?, ?, ?)", (order.id, order.item, order.state)
        )


def find(order_id: str) -> Order | None:
    with _database() as connection:
        row = connection.execute(
            "SELECT id, item, state FROM orders WHERE id = ?", (order_id,)
        ).fetchone()
    return None if row is None else Order(id=row[0], item=row[1], state=row[2])


def settle(order_id: str, state: State) -> bool:
    """Move an unpaid order to another state. Return False if it is not unpaid (any more)."""
    # A single statement: when payment and timeout coincide, exactly one of them wins.
    with _database() as connection:
        changed = connection.execute(
            "UPDATE orders SET state = ? WHERE id = ? AND state = ?",
            (state, order_id, State.UNPAID),
        )
        return changed.rowcount == 1
