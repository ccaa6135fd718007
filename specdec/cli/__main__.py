"""`python -m specdec.cli`, and what `accelerate launch -m specdec.cli` runs."""

from specdec.cli.app import main

if __name__ == "__main__":
    main()
