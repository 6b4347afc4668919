"""Fits of what surrounds a collective: compute before or beside it, an all-reduce, groups at once."""
