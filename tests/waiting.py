"""The former home of `tests.support.waiting`."""

from tests.support.waiting import until

__all__ = ["until"]
