"""Runs that are made worse on purpose, and what ``predict diagnose`` names first."""
