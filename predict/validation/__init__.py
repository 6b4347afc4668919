"""Predictions held against training runs: scores, memory, activity, the report."""
