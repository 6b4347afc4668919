"""Measurements that others published: read, fitted, predicted."""
