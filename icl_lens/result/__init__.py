"""Define what a result is: what all results share, show and store.

1. `base` is the base class of all results; `stored` writes and reads their files.
2. `view` is what a result shows, as data, and `view_text` writes it as text, Markdown and JSON.
   `renderer_registry` is where `report` registers terminal, pages and figures.
3. `tables` has their tables, and `number_format` writes numbers, percentages and intervals.

`icl_lens.results` lists the classes of results, each of which is defined beside the function that
returns it.
"""
