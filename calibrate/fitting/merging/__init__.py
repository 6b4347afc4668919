"""Several profiles put together to one."""
