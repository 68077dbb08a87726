"""`python -m dist_merge`."""

from .cli import main

if __name__ == "__main__":
    main()
