"""Makes ``manage.py delayq_worker`` known to Django."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Django has no types, and a class derived from one of them would be unknown itself.
    from delayq.integrations.django._untyped import Untyped as AppConfig
else:
    from django.apps import AppConfig


class DelayqConfig(AppConfig):
    """The app of ``delayq.integrations.django`` in ``INSTALLED_APPS``."""

    name = "delayq.integrations.django"
    label = "delayq"
