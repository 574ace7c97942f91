"""A backend for Django's Tasks framework, and its worker: ``pip install 'delayq[django]'``.

::

    INSTALLED_APPS = [..., "delayq.integrations.django"]
    TASKS = {
        "default": {
            "BACKEND": "delayq.integrations.django.DelayqBackend",
            "OPTIONS": {"url": "redis://127.0.0.1:6379/0"},
        }
    }

``manage.py delayq_worker`` then runs the tasks.
"""

try:
    import django.tasks  # noqa: F401
except ImportError as _error:
    raise ImportError(
        "delayq.integrations.django needs Django 6.0 or newer, which needs Python 3.12:"
        " pip install 'delayq[django]'"
    ) from _error

from delayq.integrations.django._backend import DelayqBackend
from delayq.integrations.django._workers import new_worker

__all__ = ["DelayqBackend", "new_worker"]
