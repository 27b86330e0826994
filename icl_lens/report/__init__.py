"""Tables, figures, terminal output and pages of results, and the live view of a prompt.

All but `live_view` compute nothing. They are loaded on first use:

1. `renderers` lists which result has which page, notebook output, terminal output and figures.
2. `terminal` has what tables of the terminal share; `view_terminal` draws any view there, and
   `explanation_terminal` an explanation.
3. `plots` draws figures; `curves`, `circuit_graph` and `atlas_maps` draw those with lines, graphs
   and maps. `axes` is what all share, `notebook_figure` makes them legible in dark notebooks, and
   `palette` has the colors.
4. `html` draws pages and elements of notebooks.
5. `live_view` is the page that changes while a user edits a prompt or clicks a head; it calls the
   analyses for what it shows.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submodules=["html", "plots", "terminal"]
)
