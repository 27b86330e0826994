"""Draw docs/images/architecture.svg and print the package structure: `python docs/architecture_diagram.py`.

Layers are read from the import-linter contracts in pyproject.toml, a package's purpose from its docstring, and the
counts from the imports.
"""

import ast
import sys
import tomllib
from html import escape
from pathlib import Path
from textwrap import wrap

import grimp

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
WIDTH, FLOOR, LINE, GAP, NAME = 980, 40, 19, 6, 215
MAX_CHARACTERS = 84
STYLE = (
    "text{font:15px ui-sans-serif,system-ui,sans-serif;fill:#1b1b1a}.name{font-weight:600}.quiet{fill:#5d5d5d}"
    "rect{fill:#f4f6f8;stroke:#9db4c6}.lab rect{fill:#faf5ec;stroke:#cdb68a}path{stroke:#5d5d5d;fill:none}"
    "@media(prefers-color-scheme:dark){text{fill:#e8e6e3}.quiet{fill:#a5a29d}rect{fill:#20242a;stroke:#46586a}"
    ".lab rect{fill:#292419;stroke:#6b5a35}path{stroke:#a5a29d}}"
)


def floors(package: str) -> list[list[str]]:
    """Return the layers of a top-level package from the top down, each as a list of subpackages."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c["type"] == "layers" and c["containers"] == [package])
    names = [[name.strip() for name in layer.split("|")] for layer in layers]
    return [layer for layer in names if layer != ["__main__"]]


def job(package: str, name: str) -> str:
    """Return the purpose of a subpackage or module: the first sentence of its docstring."""
    path = ROOT / package / name
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(source.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".").replace("`", "")


def drawing() -> str:
    """Return the package structure as SVG: one row per subpackage, with an arrow for the direction of imports."""
    rows = [("lab", "experiments", name) for layer in floors("experiments") for name in layer]
    split = len(rows)
    rows += [("", "icl_lens", name) for layer in floors("icl_lens") for name in layer]
    pieces, y = [], 30
    for number, (kind, package, name) in enumerate(rows):
        if number in (0, split):
            y += 26 if number else 0
            pieces.append(f'<text x="40" y="{y - 8}" class="quiet">{package}/</text>')
        folder = "/" if (ROOT / package / name).is_dir() else ""
        lines = wrap(job(package, name), MAX_CHARACTERS)
        height = FLOOR + LINE * (len(lines) - 1)
        text = "".join(
            f'<text x="{40 + NAME}" y="{y + 25 + LINE * i}">{escape(line)}</text>' for i, line in enumerate(lines)
        )
        pieces.append(
            f'<g class="{kind}"><rect x="40" y="{y}" width="{WIDTH - 60}" height="{height}" rx="5"/>'
            f'<text x="54" y="{y + 25}" class="name">{escape(name)}{folder}</text>{text}</g>'
        )
        y += height + GAP
    arrow = f'<path d="M20 34V{y - 14}M14 {y - 24}L20 {y - 12}L26 {y - 24}" stroke-width="1.5"/>'
    label = f'<text class="quiet" transform="translate(14 {y // 2 + 60}) rotate(-90)">imports point down</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img" '
        f'aria-label="The packages, top-down"><style>{STYLE}</style>{arrow}{label}{"".join(pieces)}</svg>\n'
    )


def circles(edges: set[tuple[str, str]]) -> list[list[str]]:
    """Return the import cycles: strongly connected groups of two or more modules or packages."""
    nodes = {node for edge in edges for node in edge}
    reach = {node: {target for source, target in edges if source == node} for node in nodes}
    for middle in nodes:
        for node in nodes:
            if middle in reach[node]:
                reach[node] |= reach[middle]
    cycles = {frozenset(other for other in nodes if other in reach[node] and node in reach[other]) for node in nodes}
    return sorted(sorted(cycle) for cycle in cycles if len(cycle) > 1)


def measure(root: Path) -> dict[str, object]:
    """Count packages, modules and imports between packages of `icl_lens` and `experiments`, and list import cycles."""
    sys.path.insert(0, str(root))
    try:
        graph = grimp.build_graph("icl_lens", "experiments", cache_dir=None)
    finally:
        sys.path.pop(0)
    imports = {
        (source, target)
        for source in graph.modules
        for target in graph.find_modules_directly_imported_by(source)
        if source != target
    }

    def subpackage(module: str) -> str:
        package, _, rest = module.partition(".")
        return f"{package}.{rest.partition('.')[0]}" if rest else package

    edges = {(subpackage(a), subpackage(b)) for a, b in imports if subpackage(a) != subpackage(b)}
    packages = {subpackage(module) for module in graph.modules} - {"icl_lens", "experiments"}
    return {
        "packages": len(packages),
        "modules": len(graph.modules),
        "imports between packages": len(edges),
        "cycles of packages": circles(edges),
        "cycles of modules": circles(imports),
    }


if __name__ == "__main__":
    PICTURE.write_text(drawing(), encoding="utf-8")
    for name, value in measure(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT).items():
        print(f"{name}: {value}")
