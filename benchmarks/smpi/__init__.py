"""Collectives and iterations of 128 to 1,024 ranks against SimGrid."""
