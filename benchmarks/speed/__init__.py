"""How fast predictions, searches and simulations are, and what profiling costs."""
