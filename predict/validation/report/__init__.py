"""One HTML file that explains a prediction, or runs beside their predictions."""
