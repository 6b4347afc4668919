"""What single ranks of a run did: when they worked, and what they spent in calls, beside what was predicted."""
