"""What a rank does beside its stages' forward: backward as torch's schedules call it, gradients that ranks share."""
