"""Entries of a profile about collectives: fits, residuals, and what surrounds a call."""
