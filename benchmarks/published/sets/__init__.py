"""Sets of published runs: inputs read, runs predicted, answers read; one file a set."""
