"""A planted model with a study of it, as the scripts of `experiments/` have one."""

from pathlib import Path

import common
from planted import Kind, build

import icl_lens as il

WRITING = ("two-tower", "copier", "last-label", "majority")
"""Roles of heads that write labels into the answer."""


def planted_study(kind: Kind, folder: Path, n: int = 40, seed: int = 0) -> common.Study:
    """Return a study of a planted model; it locates as many heads as write labels, or four if none
    does.
    """
    planted = build(kind, folder, seed=seed)
    n_heads = sum(len(planted.heads[role]) for role in WRITING) or 4
    options = [
        "--model",
        str(planted.folder),
        "--path",
        str(planted.words),
        "-n",
        str(n),
        "--heads",
        str(n_heads),
    ]
    study = common.Study.from_command_line(
        "planted", "", [*options, "--out", str(folder / "results")]
    )
    return study.with_model(il.load_model(str(planted.folder), device="cpu"))
