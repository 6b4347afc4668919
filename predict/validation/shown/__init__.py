"""What is said of a validation: files, tables, pictures, and what stands out."""
