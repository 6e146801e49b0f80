"""Research on quality: what wirings cost."""

from extras.research import sensitivity

__all__ = ["sensitivity"]
