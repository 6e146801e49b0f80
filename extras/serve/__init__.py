"""An HTTP server with OpenAI's API, for serve.py."""

from ladder.errors import InputError


def main(argv=None):
    """Serve, as the flags say. Raises InputError without the packages of requirements-serve.txt."""
    try:
        from extras.serve import server
    except ImportError as e:
        words = "Starlette and uvicorn are missing"
        raise InputError(f"{words} ({e}): make serve, or see requirements-serve.txt") from None
    server.main(argv)
