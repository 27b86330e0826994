"""What was found, shown: tables, figures, terminal output, pages.

1. `findings`: everything an explanation of one prompt holds, as plain data.
2. `tables`, `plots`, `terminal`, `html`: each draws such data in its own way; none of them computes, and none knows
   `explain`. They are loaded when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submodules=["findings", "html", "plots", "tables", "terminal"]
)
