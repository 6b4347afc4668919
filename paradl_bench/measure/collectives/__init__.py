"""Sweeps of collectives: alone, in groups at once, after compute, beside compute or an all-reduce."""
