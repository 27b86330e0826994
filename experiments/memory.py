"""`python -m experiments.memory [FOLDER [DTYPE]]`: peak memory of `icl_lens.explain`, against the weights.

Without a folder, a GPT-2 large (774 million parameters) with random weights is built in a temporary one. The child
process that explains reports its resident set after imports, after loading, and at its peak.
"""

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

PROMPT = "love : bar like : bar eight : foo two : foo one :"


def peak_mib() -> float:
    """The process's largest resident set so far, MiB; pages of a mapped weight file count."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def build(folder: Path) -> None:
    """GPT-2 large's shape with random weights, and a tokenizer of whole words that knows the prompt's."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = GPT2Config(n_layer=36, n_embd=1280, n_head=20)
    GPT2LMHeadModel(config).save_pretrained(folder)
    words = list(dict.fromkeys(["<unk>", *PROMPT.split()]))
    words += [f"w{i}" for i in range(len(words), config.vocab_size)]
    fast = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="<unk>").save_pretrained(folder)


def measure(folder: str, dtype: str) -> dict[str, float]:
    """MiB: peaks after imports, after loading and after explaining; the weights; and peak over weights."""
    import torch
    import transformer_lens.model_bridge  # noqa: F401  counted with the imports, not with the loading

    import icl_lens as il

    imports = peak_mib()
    model = il.load_model(folder, device="cpu", dtype=getattr(torch, dtype))
    loaded = peak_mib()
    il.explain(model, PROMPT, answer="foo")
    # Parts of a fused matrix are views of one storage, which is counted once.
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    weights = sum(storages.values()) / 2**20
    peak = peak_mib()
    return {"imports": imports, "loaded": loaded, "peak": peak, "weights": weights, "ratio": peak / weights}


def _child(folder: str, dtype: str) -> dict[str, float]:
    command = [sys.executable, "-m", "experiments.memory", "--child", folder, dtype]
    out = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parent.parent).stdout
    return json.loads(out.splitlines()[-1])


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--child"]:
        print(json.dumps(measure(*arguments[1:])))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder, dtype = ([*arguments, "float32"] if arguments else [temporary, "float32"])[:2]
        if not arguments:
            build(Path(folder))
        numbers = _child(folder, dtype)
    for name, value in numbers.items():
        print(f"{name:8} {value:8.3f}" if name == "ratio" else f"{name:8} {value:8.0f} MiB")


if __name__ == "__main__":
    main(sys.argv[1:])
