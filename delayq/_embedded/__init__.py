"""The embedded server: a private Valkey, and the watchdog that ends it with its last user."""
