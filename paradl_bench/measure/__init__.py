"""Measuring: timers, environment, process groups, layers, collectives, training runs."""
