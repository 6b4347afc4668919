"""One folder a strategy: plan.py (torch-free) and, where it can run, module.py (torch)."""
