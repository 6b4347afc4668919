"""One file an operation: its cost terms, its bus-bandwidth factor, and how it is run and checked through torch."""
