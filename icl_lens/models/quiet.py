"""Keep transformers quiet while it loads what needs no report: its progress bars and its tables of weights."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_bars() -> Iterator[None]:
    """Disable transformers' progress bars, which would report a load that takes no time."""
    from transformers.utils import logging as reports

    shown = reports.is_progress_bar_enabled()
    reports.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            reports.enable_progress_bar()


@contextmanager
def without_reports() -> Iterator[None]:
    """Leave out transformers' table of missing weights: they are refused in one sentence."""
    logger = logging.getLogger("transformers.modeling_utils")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
