"""Regressors of kernels: trained, tried on held-out shapes, chosen."""
