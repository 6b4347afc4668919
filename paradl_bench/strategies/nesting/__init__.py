"""Axes in each other: strategies by kind, the plan of any nesting, its process groups, its run."""
