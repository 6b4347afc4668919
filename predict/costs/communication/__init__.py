"""Seconds of collectives: the fit, contention, congestion, what compute around a call changes."""
