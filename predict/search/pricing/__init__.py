"""Seconds and memory of many candidates at once, as arrays."""
