"""One device, no exchange: what every strategy is compared with."""
