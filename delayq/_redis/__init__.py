"""Everything that talks to the server. Nothing outside this package imports ``redis``."""
