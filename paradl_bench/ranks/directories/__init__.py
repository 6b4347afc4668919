"""Measurement directories: created once, locked by one writer, resumed; and what else the host did."""
