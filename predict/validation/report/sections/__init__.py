"""What a report says, one file a section."""
