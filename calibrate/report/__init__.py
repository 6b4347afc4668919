"""What ``calibrate`` shows: a profile, its weak points, drawings, differences of two."""
