"""`python -m creditscope` is the command line."""

from creditscope.cli import main

if __name__ == "__main__":
    main()
