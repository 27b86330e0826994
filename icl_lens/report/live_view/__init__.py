"""A live view of one prompt in a notebook: edit a demonstration, click a head, and see what
changes.

1. `state` says what is looked at, as a plain value: the prompt, the chosen heads, what is done to
   them, the map shown.
2. `panels` computes what is shown of a state with the library's public functions, the quickest
   first.
3. `worker` computes the newest state's panels in a thread, and stops as soon as there is a newer
   state.
4. `code` writes the calls that give the numbers of a state.
5. `static` draws a state without a script, for notebooks that are opened without their kernel.
6. `view` opens the view (`il.live`), and `widget` is the view itself; `live.js` and `live.css` draw
   it in the browser and hold no formula.
7. `browser` shows it without a notebook, as the page that `marimo_page` makes.
"""
