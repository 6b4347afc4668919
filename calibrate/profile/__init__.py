"""The profile: the file, its schema, and what its entries mean."""
