"""Ranks that come late: which, how often, and what that costs the others."""
