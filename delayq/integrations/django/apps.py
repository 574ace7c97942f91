"""Makes ``manage.py delayq_worker`` known to Django."""

from django.apps import AppConfig


class DelayqConfig(AppConfig):  # type: ignore[misc]
    """The app of ``delayq.integrations.django`` in ``INSTALLED_APPS``."""

    name = "delayq.integrations.django"
    label = "delayq"
