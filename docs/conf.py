"""Sphinx: `sphinx-build -W -b html docs docs/_build/html`. Needs no network; runs every tutorial."""

import os
import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

# Make tutorial outputs reproducible: installed models, no network, quiet loaders.
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", HF_HUB_DISABLE_PROGRESS_BARS="1")

project = "icl_lens"
author = "the icl_lens contributors"
copyright = author
version = release = metadata.version("icl-lens")

extensions = ["myst_nb", "sphinx.ext.autodoc", "llms_txt", "local_links", "results_table"]
templates_path = []
exclude_patterns = ["_build", "jupyter_execute", "**/.ipynb_checkpoints"]

# Docstrings use single backticks for code; signatures contain axes ("batch layer head").
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"

myst_enable_extensions = ["deflist", "fieldlist", "colon_fence", "attrs_inline"]
myst_heading_anchors = 3

nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 900
nb_execution_show_tb = True
nb_merge_streams = True
nb_ipywidgets_js = {}  # pages load no scripts from elsewhere

html_theme = "furo"
html_title = "icl_lens"
html_static_path = ["_static"]
html_css_files = ["icl_lens.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0072B2", "color-brand-content": "#0072B2"},
    "dark_css_variables": {"color-brand-primary": "#56B4E9", "color-brand-content": "#56B4E9"},
}
