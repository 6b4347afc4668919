"""``predict``, and ``python -m predict``."""

from collections.abc import Callable

from paradl_bench.core.terminal.entry_point import entry_point


def _load() -> Callable[[], None]:
    from predict.cli import main

    return main


# To free millions of objects one by one takes a large search over a second.
main = entry_point(_load, frees=False)

if __name__ == "__main__":
    main()
