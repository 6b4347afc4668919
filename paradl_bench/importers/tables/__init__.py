"""What tables of several formats have in common: Markdown, and numbers."""
