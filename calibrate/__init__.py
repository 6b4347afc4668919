"""Fits: alpha/beta per level and library, layer statistics, contexts -> one profile."""
