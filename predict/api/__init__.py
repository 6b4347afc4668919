"""Predictions in Python: a profile that is loaded once, and results as DataFrames and figures."""
