"""Imported before torch, this lets OpenMP's waiting threads soon sleep: spinning on, they stall a busy machine."""

import os
import sys

if "torch" not in sys.modules:  # it reads the variable as it loads: afterwards, setting it would change nothing here
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
