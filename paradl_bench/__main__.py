"""``python -m paradl_bench``: the same as ``paradl-bench``."""

from paradl_bench.spec.working_directory import leave_out_working_directory

# Before anything else is imported.
leave_out_working_directory()

from paradl_bench.cli import main  # noqa: E402

main()
