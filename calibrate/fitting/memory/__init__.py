"""Fits of memory: factors over what plans say of tensors."""
