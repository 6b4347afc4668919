"""A catalogue of GPUs as their makers describe them: one file a device, with a source for each number."""
