"""Fits: alpha/beta per level and library, layer statistics, interference -> one profile."""
