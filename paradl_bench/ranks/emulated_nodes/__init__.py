"""Nodes emulated on one host: network namespaces, joined by links of a given rate."""
