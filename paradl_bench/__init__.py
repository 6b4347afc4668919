"""Measures: layer times, collective sweeps, real training runs."""

from paradl_bench.api.raw_samples import measure_layers as measure_layers
from paradl_bench.api.raw_samples import read as read
