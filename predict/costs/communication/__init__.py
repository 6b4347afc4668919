"""Seconds of collectives: the fit, contention, what surrounds a call."""
