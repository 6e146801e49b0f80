"""An HTTP server with OpenAI's API, for serve.py."""

from ladder.errors import InputError

try:
    from extras.serve.server import main
except ImportError as e:
    raise InputError(f"Starlette and uvicorn are missing ({e}): make serve, or see requirements-serve.txt") from None

__all__ = ["main"]
