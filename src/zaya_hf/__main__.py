"""`python -m zaya_hf`: the `zaya` command where no script of that name is installed or on the path."""

import sys

import zaya_cli

if __name__ == "__main__":
    sys.exit(zaya_cli.main())
