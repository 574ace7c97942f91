"""The table of the outbox: tasks that wait for the commit of the transaction that enqueued them."""

from typing import TYPE_CHECKING, Any

from django.db import models

if TYPE_CHECKING:
    # As in apps.py.
    from delayq.integrations.django._untyped import Untyped as Model
else:
    from django.db.models import Model


class OutboxRow(Model):
    """A task that is not in its queue yet: see :class:`delayq.outbox._rows.Row`."""

    number: Any = models.BigAutoField(primary_key=True)
    backend: Any = models.CharField(max_length=255)
    queue: Any = models.CharField(max_length=512)
    # Django keeps the name of the field for primary keys.
    message_id: Any = models.CharField(max_length=512, db_column="id")
    body: Any = models.BinaryField()
    priority: Any = models.SmallIntegerField()
    delay_us: Any = models.BigIntegerField(null=True)
    at_us: Any = models.BigIntegerField(null=True)
    ttl_us: Any = models.BigIntegerField()
    unique_us: Any = models.BigIntegerField()
    on_duplicate: Any = models.CharField(max_length=8)
    created_us: Any = models.BigIntegerField()
    mark: Any = models.TextField(null=True)
    error: Any = models.TextField(null=True)

    class Meta:
        """Its indexes are those of :func:`delayq.outbox._table.new_table`."""

        app_label: str = "delayq"
        db_table: str = "delayq_task_outbox"
        verbose_name: str = "outbox row"
        indexes: tuple[Any, ...] = (
            models.Index(
                fields=["backend", "queue", "number"],
                name="delayq_task_outbox_waiting",
                condition=models.Q(error__isnull=True),
            ),
            models.Index(
                fields=["backend", "queue"],
                name="delayq_task_outbox_marked",
                condition=models.Q(mark__isnull=False),
            ),
        )
