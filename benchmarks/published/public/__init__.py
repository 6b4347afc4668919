"""Predictions against public measurements: one module a source, told together by ``public_measurements.py``."""
