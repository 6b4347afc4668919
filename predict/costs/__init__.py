"""Seconds of single tasks, each with its source and its spread."""
