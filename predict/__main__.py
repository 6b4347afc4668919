"""``python -m predict``: the same as ``predict``."""

from paradl_bench.spec.working_directory import leave_out_working_directory

# Before anything else is imported.
leave_out_working_directory()

from predict.cli import main  # noqa: E402

main()
