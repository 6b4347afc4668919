"""Benchmarks of others that are run as programs: one file a tool, found by discovery."""
