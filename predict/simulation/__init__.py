"""Simulation of an iteration: tasks on streams, pipelines, late ranks, input."""
