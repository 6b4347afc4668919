"""Measures: layer times, collective sweeps, real training runs."""
