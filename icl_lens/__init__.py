"""Which heads make a language model learn in context, and how? Locate, project, intervene, explain.

The public names stand in `__init__.pyi`, each beside the module it lives in; that module is imported when the name is
first used, so that `import icl_lens` costs nothing.
"""

from typing import Any

import lazy_loader

_public, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("icl-lens")
    return _public(name)
