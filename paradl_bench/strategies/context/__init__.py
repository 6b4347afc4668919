"""Context parallelism: ranks compute parts of the sequence, with keys and values of all of it."""
