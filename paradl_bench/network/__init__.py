"""The network that is trained: the traced graph, layer kinds, models, kernels, and how extents are cut."""
