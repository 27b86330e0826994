"""Pages taken apart as a browser would, without a browser."""

from html.parser import HTMLParser

from icl_lens.report.html.templating import asset


class Page(HTMLParser):
    """A page's elements, its visible text, and its scripts, as a browser would split them."""

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.elements, self.text, self.scripts, self._inside = [], "", [], []
        self.feed(source)
        self.close()
        code = [
            asset("host_theme.js") + asset("theme.js"),
            asset("page.js"),
            asset("circuitsvis.js"),
        ]
        self.scripts = [script for script in self.scripts if script not in code]  # the rest is data

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside.append(tag)
            if tag == "script":
                self.scripts.append("")

    def handle_endtag(self, tag):
        if self._inside and self._inside[-1] == tag:
            self._inside.pop()

    def handle_data(self, data):
        if not self._inside:
            self.text += data
        elif self._inside[-1] == "script":
            self.scripts[-1] += data

    def all(self, tag, **attrs):
        return [
            a for t, a in self.elements if t == tag and all(a.get(k) == v for k, v in attrs.items())
        ]
