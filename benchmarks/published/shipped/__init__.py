"""What profiles that come with the tool are made of: tables, and what stands in for kernels that none has."""
