"""``calibrate``, and ``python -m calibrate``."""

from paradl_bench.spec.working_directory import leave_out_working_directory

# Before anything else is imported.
leave_out_working_directory()

from paradl_bench.spec.interruption import end_at_once_until_started  # noqa: E402


def main() -> None:
    """Entry point: from its first moment on an interrupt ends it in one line."""
    end_at_once_until_started()
    from calibrate.cli import main as run

    run()


if __name__ == "__main__":
    main()
