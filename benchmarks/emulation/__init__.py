"""Strategies over emulated nodes, on layers that sleep, against their predictions."""
