"""Runs for `python -m specdec.cli` and `accelerate launch -m specdec.cli`."""

from specdec.cli.app import main

if __name__ == "__main__":
    main()
