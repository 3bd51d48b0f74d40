"""Keyed state: a table of one row a key, kept as immutable sorted runs and a manifest an epoch."""
