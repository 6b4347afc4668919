"""Tensor parallelism: pairs of linear layers, the first one cut by its columns, the second by its rows."""
