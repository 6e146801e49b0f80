"""Tasks of lm-evaluation-harness, for eval.py --tasks."""

from runtime.errors import InputError

try:
    from extras.lm_eval import harness
except ImportError as e:
    raise InputError(f"--tasks needs lm-eval ({e}): pip install lm_eval==0.4.13") from None

__all__ = ["harness"]
