"""Collectives and messages that a run issues: recorded one by one where nothing is timed, and timed one by one."""
