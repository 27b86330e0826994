"""Loads GGUF files from the small Hub beside this file, for test_gguf_hub.py: `python gguf_hub.py FOLDER PART`.

A process of its own, since the Hub's address, its cache and whether there is a network are read from the environment
once. FOLDER contains one folder for each revision; PART is online or offline. Prints, as JSON, what each case says
and asks for.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

NAME = "some/quantized"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "by path": (f"{NAME}/x.gguf", {}),
    "by gguf_file": (NAME, {"gguf_file": "x.gguf"}),
    "a revision": (NAME, {"gguf_file": "x.gguf", "revision": "v1"}),
    "in a folder": (f"{NAME}/more/y.gguf", {}),
    "no such file": (f"{NAME}/z.gguf", {}),
    "the repository": (NAME, {}),
    "no such repository": ("some/nothing/x.gguf", {}),
}


def main(folder: Path, part: str) -> None:
    from hub import Hub

    content = {
        revision.name: {
            path.relative_to(revision).as_posix(): path.read_bytes() for path in revision.rglob("*") if path.is_file()
        }
        for revision in folder.iterdir()
    }
    with Hub({"model": {NAME: content}}) as hub:
        if part == "online":
            os.environ["HF_ENDPOINT"] = hub.url
        import torch

        import icl_lens as il

        torch.set_num_threads(1)
        told: dict[str, dict[str, Any]] = {}
        for label, (name, options) in CASES.items():
            hub.clear()
            try:
                model = il.load_model(name, device="cpu", **options)
                mark = float(model.original_model.lm_head.weight[0, 0])
                said = f"{model.cfg.model_name} of {'v1' if mark > 50 else 'main'}"
            except il.InputError as error:
                said = str(error)
            told[label] = {
                "said": said,
                "sent": [one.path for one in hub.log if one.path.endswith(".gguf") and one.sent],
            }
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
