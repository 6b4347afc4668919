"""``python -m calibrate``: the same as ``calibrate``."""

from paradl_bench.spec.working_directory import leave_out_working_directory

# Before anything else is imported.
leave_out_working_directory()

from calibrate.cli import main  # noqa: E402

main()
