"""A client for Redis and Valkey. Nothing outside this package imports ``redis``."""
