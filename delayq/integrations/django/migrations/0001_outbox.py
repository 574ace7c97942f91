"""The table of the outbox."""

from typing import TYPE_CHECKING, Any

from django.db import migrations, models

if TYPE_CHECKING:
    # As in apps.py.
    from delayq.integrations.django._untyped import Untyped as BaseMigration
else:
    from django.db.migrations import Migration as BaseMigration


class Migration(BaseMigration):
    """Creates it, empty. Only backends with the option ``OUTBOX`` write to it."""

    initial: bool = True
    dependencies: tuple[Any, ...] = ()
    operations: tuple[Any, ...] = (
        migrations.CreateModel(
            name="OutboxRow",
            fields=[
                ("number", models.BigAutoField(primary_key=True, serialize=False)),
                ("backend", models.CharField(max_length=255)),
                ("queue", models.CharField(max_length=512)),
                ("message_id", models.CharField(db_column="id", max_length=512)),
                ("body", models.BinaryField()),
                ("priority", models.SmallIntegerField()),
                ("delay_us", models.BigIntegerField(null=True)),
                ("at_us", models.BigIntegerField(null=True)),
                ("ttl_us", models.BigIntegerField()),
                ("unique_us", models.BigIntegerField()),
                ("on_duplicate", models.CharField(max_length=8)),
                ("created_us", models.BigIntegerField()),
                ("mark", models.TextField(null=True)),
                ("error", models.TextField(null=True)),
            ],
            options={
                "verbose_name": "outbox row",
                "db_table": "delayq_task_outbox",
                "indexes": [
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
                ],
            },
        ),
    )
