"""A live view in a browser without a notebook: the page passes traits to and from the widget in
this process.
"""

import json

from icl_lens.report.live_view.widget import PANEL_NAMES, LiveView

PAGE = """<!doctype html><html lang="en" {attributes}><meta charset="utf-8"><title>live</title><style>{css}</style>
<body style="margin: 0"><div id="view"></div><script type="module">
const widget = (await import("data:text/javascript;charset=utf-8," + encodeURIComponent({js}))).default;
const traits = {traits}, listeners = new Map(), sent = [];
window.take = () => sent.splice(0);
window.receive = (name, value) => {{
  traits[name] = value;
  for (const listener of listeners.get(`change:${{name}}`) || []) listener();
}};
let changed = new Set();
const model = {{
  get: (name) => traits[name],
  set: (name, value) => {{
    traits[name] = value;
    changed.add(name);
    for (const listener of listeners.get(`change:${{name}}`) || []) listener();
  }},
  save_changes: () => {{
    for (const name of changed) sent.push([name, structuredClone(traits[name])]);
    changed = new Set();
  }},
  on: (names, listener) => {{
    for (const name of names.split(" ")) listeners.set(name, [...(listeners.get(name) || []), listener]);
  }},
  off: (names, listener) => {{
    for (const name of names.split(" "))
      listeners.set(name, (listeners.get(name) || []).filter((one) => one !== listener));
  }},
}};
window.stop = widget.render({{ model, el: document.getElementById("view") }});
document.documentElement.dataset.ready = "true";
</script></body></html>"""


def page_source(traits, theme=None):
    """Return a page that draws the traits of a widget."""
    js, values = (
        json.dumps(source_value).replace("</", "<\\/") for source_value in (LiveView._esm, traits)
    )
    attributes = "" if theme is None else f'data-theme="{theme}"'
    return PAGE.format(attributes=attributes, css=LiveView._css, js=js, traits=values)


def traits_of(view):
    return {
        name: getattr(view, name)
        for name in ("_look", "_about", "_status", "_pins", *(f"_{panel}" for panel in PANEL_NAMES))
    }


class LivePage:
    """A widget and the page that draws it; `pump` passes on what either has changed."""

    def __init__(self, page, view, displayed):
        self.page, self.view, self.shown = page, view, displayed

    @classmethod
    def open(cls, page, view, path, *, theme=None):
        traits = traits_of(view)
        path.write_text(page_source(traits, theme), encoding="utf-8")
        page.goto(path.as_uri())
        page.wait_for_function("document.documentElement.dataset.ready")
        return cls(page, view, traits)

    def pump(self):
        """Pass the page's changes to the widget, and the widget's panels to the page."""
        for name, value in self.page.evaluate("take()"):
            self.shown[name] = value
            setattr(self.view, name, value)
        for name, value in traits_of(self.view).items():
            if value != self.shown[name]:
                self.shown[name] = value
                self.page.evaluate("([name, value]) => receive(name, value)", [name, value])

    def settle(self, timeout=120.0):
        """Pump until everything that the page shows is computed."""
        self.pump()
        assert self.view.wait(timeout)
        self.pump()
        assert self.page.locator(".icl-live").get_attribute("aria-busy") == "false", (
            self.view._status
        )
