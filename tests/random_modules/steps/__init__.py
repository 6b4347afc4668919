"""Steps by what they work on; each module registers its operations when it is loaded."""
