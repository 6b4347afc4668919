"""Sweeps of kernels that regressors are trained on: designed, run, resumed, summarised."""
