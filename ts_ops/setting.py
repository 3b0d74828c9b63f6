"""A value that each thread has for itself, and that a `with` block changes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Setting(threading.local):
    """`value` is what every thread starts with; Python calls `__init__` again in each thread that asks."""

    def __init__(self, value):
        self.value = value

    @contextmanager
    def changed(self, value) -> Iterator[None]:
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before
