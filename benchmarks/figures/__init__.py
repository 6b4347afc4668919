"""Figures of the papers, drawn from committed results, and runs that are drawn."""
