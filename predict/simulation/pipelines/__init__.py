"""Pipelines, whose stages wait for each other: their simulation, their stragglers, stages that share a host."""
