"""From measurements to a profile: readings, fits by subject, the merge of profiles."""
