"""Tables, figures, terminal output and pages of results.

`views` lists which result has which; `plots`, `terminal` and `html` render them. They compute
nothing, and are loaded on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submodules=["html", "plots", "terminal"]
)
