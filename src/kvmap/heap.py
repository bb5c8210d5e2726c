"""Have the C library give freed memory back, where work comes in ever other sizes.

glibc keeps what is freed in pieces of up to 32 MB for the next such pieces. Where these are of
other sizes every time they do not fit the holes, and what a process holds grows with every round:
half as much again within four steps of a polish.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress

M_MMAP_THRESHOLD = -3
# From this size on, pieces are the system's own, and given back as soon as they are free.
LARGE = 1 << 20
# Where the library's own threshold, which grows with what is freed, ends up.
USUAL = 32 << 20


@contextmanager
def large_pieces_returned() -> Iterator[None]:
    """Give pieces of a megabyte or more back at once; nothing where the library is another."""
    _set_threshold(LARGE)
    try:
        yield
    finally:
        _set_threshold(USUAL)


def _set_threshold(size: int) -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, size)
