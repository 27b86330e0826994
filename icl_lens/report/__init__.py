"""Tables, figures, terminal output and pages of results.

1. `explanation`: an explanation of one prompt, as typed sections.
2. `plots`, `terminal`, `html`: renderers of that data. They compute no results, do not import `explain`, and
   are loaded on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submodules=["explanation", "html", "plots", "terminal"])
