"""What tables of several formats have in common: Markdown, numbers, rows of one size each."""
