"""`python -m zaya_cli`: the `zaya` command."""

import sys

from zaya_cli import main

sys.exit(main())
