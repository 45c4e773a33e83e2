"""`python -m airs_client` is `airs`."""

from airs_client.cli import main

if __name__ == "__main__":
    main()
