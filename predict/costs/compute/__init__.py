"""Seconds of compute: layers, kernels, weight update, copies of gradients, time between operations."""
