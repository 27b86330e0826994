"""Suppress transformers' progress bars and weight reports while loading."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_bars() -> Iterator[None]:
    """Disable transformers' progress bars for fast loads."""
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
    """Suppress transformers' table of missing weights, which raise InputError instead."""
    logger = logging.getLogger("transformers.modeling_utils")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
