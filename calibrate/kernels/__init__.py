"""Kernel regressors as a profile holds them: features, trees, processes; evaluated with numpy."""
