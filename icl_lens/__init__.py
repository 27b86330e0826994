"""Interpret in-context learning in language models: locate heads, project, intervene, explain.

`__init__.pyi` lists the public names and the modules that define them. A module is imported when
one of its names is first used, which keeps `import icl_lens` fast.
"""

import warnings
from typing import Any

import lazy_loader

from icl_lens.result.renderer_registry import Renderers, register_renderers

# tqdm, which transformers imports, warns in notebooks without ipywidgets and then shows its bars as
# text.
warnings.filterwarnings("ignore", message="IProgress not found")


def _renderers() -> Renderers:
    from icl_lens.report import renderers

    return renderers


register_renderers(_renderers)

_public, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("icl-lens")
    return _public(name)
