"""A model traced into a graph: its operations, who made which tensor, how long memory is held."""
