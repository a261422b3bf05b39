"""`python -m lmi_config`: check the options, with nothing installed but Python."""

import contextlib
import os
import sys

from lmi_config.options.settings import SettingsError, read

try:
    with contextlib.suppress(ModuleNotFoundError):  # what reads a file is not installed yet
        read(os.environ)
except SettingsError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
