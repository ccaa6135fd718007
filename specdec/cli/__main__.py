"""`python -m specdec.cli`."""

from specdec.cli.app import main

if __name__ == "__main__":
    main()
