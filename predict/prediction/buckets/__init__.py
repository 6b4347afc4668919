"""``predict buckets``, and the messages that a rule of fusion sends."""
