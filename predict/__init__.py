"""Predicts from a profile, simulates, validates; needs no torch and no GPU."""

from predict.api.loaded_profile import load_profile as load_profile
