"""Tables, figures, terminal output and pages of results, and the live view of a prompt.

`views` lists which result has which; `plots`, `terminal` and `html` render them. They compute
nothing, and are loaded on first use. `live_view` is the page that changes while a user edits a
prompt or clicks a head; it calls the analyses for what it shows.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submodules=["html", "plots", "terminal"]
)
