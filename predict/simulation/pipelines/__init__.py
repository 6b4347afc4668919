"""Pipelines, whose stages wait for each other: their simulation, their lateness, stages that share a host."""
