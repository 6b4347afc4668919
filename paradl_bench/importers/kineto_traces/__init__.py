"""Kineto traces: events, and the collectives among them."""
