"""Readers of what other tools wrote: one file a format, found by discovery; torch-free."""
