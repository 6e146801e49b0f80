"""Cases of parametrized tests that only make test-all runs, and calls that are refused in one line."""

import pytest

from ladder.errors import InputError


def slow_case(*values, **how):
    """Return a pytest.param of a case that make test leaves to make test-all."""
    return pytest.param(*values, marks=pytest.mark.slow, **how)


def refused(words, call, *args, **more):
    """Return the message of the InputError of one line that the call must end in; words: a pattern that it has."""
    with pytest.raises(InputError, match=words) as caught:
        call(*args, **more)
    assert "\n" not in (message := str(caught.value))
    return message
