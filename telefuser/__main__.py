"""`python -m telefuser` is the `telefuser` command."""

from telefuser.cli import main

if __name__ == "__main__":
    main()
