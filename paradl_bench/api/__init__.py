"""Measurements in Python: raw samples as DataFrames, and a measurement from a script."""
