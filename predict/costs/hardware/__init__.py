"""Links and devices that nobody has measured, derived from those that were."""
