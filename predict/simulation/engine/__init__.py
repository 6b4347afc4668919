"""The simulator's event loop, compiled and in Python: the same steps in the same order."""
