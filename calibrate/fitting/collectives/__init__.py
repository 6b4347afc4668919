"""Fits of collectives: alpha, beta and their forms, segments of sizes, spread."""
