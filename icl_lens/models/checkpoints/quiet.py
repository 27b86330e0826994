"""Keep loading quiet and the environment unchanged."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_loading(*, bars: bool) -> Iterator[None]:
    """Suppress transformers' table of missing weights, which raise InputError instead, and its bars
    unless `bars`.
    """
    from transformers.utils import logging as reports

    logger = logging.getLogger("transformers.modeling_utils")
    level, has_bars = logger.level, reports.is_progress_bar_enabled()
    logger.setLevel(logging.CRITICAL)
    if not bars:
        reports.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        if has_bars:
            reports.enable_progress_bar()


@contextmanager
def no_processor() -> Iterator[None]:
    """Load models of images and text without their processor, which no function of this package
    uses.

    Where it cannot be loaded, TransformerLens runs `pip install torchvision`, which replaces the
    installed torch.
    """
    from transformers import AutoProcessor

    name = "from_pretrained"
    load = vars(AutoProcessor)[name]
    setattr(AutoProcessor, name, classmethod(lambda cls, *args, **kwargs: None))
    try:
        yield
    finally:
        setattr(AutoProcessor, name, load)
