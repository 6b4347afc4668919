"""What tables of several formats have in common: Markdown, numbers, numbers of ranks."""
