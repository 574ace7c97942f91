"""Settings of a Django project whose tasks run in delayq, on the server in ``$DELAYQ_URL``."""

import os

SECRET_KEY = "only for tests"
USE_TZ = True
INSTALLED_APPS = ["delayq.integrations.django", "tests.support.django_project"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("TEST_DATABASE", ":memory:"),
    }
}
if directory := os.environ.get("TEST_POSTGRES"):
    DATABASES["default"] = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "postgres",
        "USER": "postgres",
        "HOST": directory,
    }
BACKEND = "delayq.integrations.django.DelayqBackend"
TASKS = {
    "default": {
        "BACKEND": BACKEND,
        "QUEUES": ["default", "emails"],
        "OPTIONS": {"url": os.environ.get("DELAYQ_URL", "redis://127.0.0.1:1/0")},
    }
}
