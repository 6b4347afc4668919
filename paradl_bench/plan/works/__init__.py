"""Kinds of work that tasks do: what each is, and what is said of it."""
