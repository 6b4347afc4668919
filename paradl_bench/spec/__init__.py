"""The vocabulary of the project: torch-free, frozen, self-validating."""
