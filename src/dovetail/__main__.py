"""`python -m dovetail`: the command, where it is not installed."""

from dovetail.cli import main

if __name__ == "__main__":
    main()
