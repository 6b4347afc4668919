"""Pipeline schedules: one file each, found by discovery."""
