"""``paradl-bench``, and ``python -m paradl_bench``."""

from collections.abc import Callable

from paradl_bench.core.terminal.entry_point import entry_point


def _load() -> Callable[[], None]:
    from paradl_bench.cli import main

    return main


main = entry_point(_load)

if __name__ == "__main__":
    main()
