"""Tools for operators: inspect a server, diagnose it, limit its users' rights, migrate its data."""
