"""The directive `results-table`: rows and columns of a csv file that a script of `experiments/` wrote.

    ```{results-table} data/ablation.csv
    :rows: measure == "log-odds lost, heads zeroed" and ranking == "contrast"
    :columns: model, task, quantity, control, difference
    :names: model, task, without located heads, without random heads, difference [95%]
    ```

`:rows:` is an expression of `pandas.DataFrame.query`. `:columns:` are those of the file, and "difference": quantity −
control with its interval. With `:across: task`, there is one line per measure and a column for each of the values of
`:across:`, which have the quantity and, in parentheses, the control; the text of the column `:after:` follows. With
`:lines: script, claim` as well, the file's rows are claims: a line per claim, and whether it holds.
"""

from pathlib import Path
from typing import Any, ClassVar

from csv_tables import table
from docutils.parsers.rst import directives
from docutils.parsers.rst.directives.tables import CSVTable
from sphinx.application import Sphinx


class ResultsTable(CSVTable):
    """The directive; docutils lays the table out."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = dict.fromkeys(
        ("rows", "columns", "names", "across", "after", "lines"), directives.unchanged
    )
    has_content = False

    def run(self) -> list[Any]:
        page = Path(str(self.state.document.current_source))
        path = page.parent / self.arguments[0]
        self.env = self.state.document.settings.env
        self.env.note_dependency(str(path))
        try:
            lines = table(path, self.options)
        except (OSError, ValueError, KeyError) as error:
            raise self.error(f"results-table: {error}") from error
        self.arguments = []
        self.options = {"header-rows": 1, "widths": "auto"}
        quoted = [",".join('"' + text.replace('"', '""') + '"' for text in line) for line in lines]
        self.content = type(self.content)(quoted, source=str(path))
        return super().run()


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("results-table", ResultsTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
