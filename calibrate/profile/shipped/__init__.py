"""Profiles that come with the tool, made of published measurements: what they say of themselves, and their names."""
