"""Predicts from a profile, simulates, validates; needs no torch and no GPU."""
