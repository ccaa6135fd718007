"""Runs for `python -m specdec` and `accelerate launch -m specdec`."""

from specdec.cli.app import main

if __name__ == "__main__":
    main()
