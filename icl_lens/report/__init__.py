"""What was found, shown: tables, figures, terminal output, pages. Loaded when first used."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submodules=["findings", "html", "plots", "tables", "terminal"]
)
