"""What a framework overlaps, holds, adds up and sends in the place of torch."""
