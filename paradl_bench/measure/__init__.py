"""Measuring: models traced and executed, layers, kernels, collectives, input, training runs, machines."""
