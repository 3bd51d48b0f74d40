"""The page of a home: what its jobs do, read from files, and an HTTP API under it."""
