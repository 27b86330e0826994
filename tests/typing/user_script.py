"""What a user writes, for the type checker: every name comes from `import icl_lens as il`."""

from pathlib import Path

import pandas as pd
from torch import Tensor

import icl_lens as il

model = il.load_model("icl-mini", dtype="float32")
n_layers: int = model.cfg.n_layers  # a TransformerBridge, with completion
prompt = il.Prompt.parse("love : bar like : bar eight : foo two : foo one :", answer="foo")
batch: il.PromptBatch = il.tokenize(model, [prompt])
acts: il.Activations = il.capture(model, batch)
increases: Tensor = il.head_log_prob_increase(acts)

top: il.results.TopHeads = il.top_heads(acts, k=3, by="contrast")
heads: list[il.Head] = top.heads
table: pd.DataFrame = top.to_frame()
words: list[list[str]] = acts.readout.top_tokens(acts.label_values(heads[0])[0], k=5)

with il.ablate_heads(model, heads, mode="zero"):
    without: Tensor = il.score(model, batch)

explanation: il.results.Explanation = il.explain(model, prompt, k=5)
layers: pd.DataFrame = explanation.to_frame("layers")
page: str = explanation.to_html()
log_probs: tuple[float, ...] = explanation.scores.log_probs
loaded: il.results.TopHeads = il.results.TopHeads.load("best.json")

located = il.locate(
    model, il.load_task("sentiment-number", n=20, layout="reorder"), k=4, final_norm="frozen"
)
names: list[str] = [str(head) for head in located.heads]
frame: pd.DataFrame = located.to_frame()
accuracy: float = il.metrics.accuracy(without, batch)
explanation.to_html(Path("page.html"))
