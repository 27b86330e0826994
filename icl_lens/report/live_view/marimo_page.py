"""The page of `icl-lens live`: marimo runs this file once per browser tab."""

import marimo  # pyright: ignore[reportMissingImports]

app = marimo.App(width="full", app_title="icl-lens live")


@app.cell
def _():
    from icl_lens.report.live_view.browser import new_view

    new_view()
    return


if __name__ == "__main__":
    app.run()
