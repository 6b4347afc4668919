"""Spatial parallelism: every rank computes a block of positions, with halos from its neighbours."""
