"""What a plan's ranks hold at their peak: the memory model, which fits and predictions both read."""
