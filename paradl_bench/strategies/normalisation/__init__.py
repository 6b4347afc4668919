"""Batch normalisation whose statistics are taken over several ranks: which layers, how they run."""
