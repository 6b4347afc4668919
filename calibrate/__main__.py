"""``python -m calibrate``."""

from calibrate.cli import main

if __name__ == "__main__":
    main()
