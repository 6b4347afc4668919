"""Models by name; torch is imported inside functions only."""
