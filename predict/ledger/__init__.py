"""Ledgers: what every second of a predicted iteration is made of."""
