"""A prediction on other links, another device, other rank counts, batches or layers."""
