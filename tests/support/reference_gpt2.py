"""GPT-2 and its log-probability increases, written out by hand from the state dict.

Nothing here calls a Hugging Face forward pass: only matrix products, so that the package and the hook-based
reference can both be checked against a third party. One unpadded prompt at a time; slow and plain on purpose.

`python tests/reference_gpt2.py` compares it with Hugging Face's own logits.
"""

import copy
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

FinalNorm = Literal["frozen", "own"]


def _gelu_new(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


class Gpt2Reference:
    """The weights of a GPT2LMHeadModel in `dtype`, by name, and a forward pass that keeps everything.

    Raises ValueError for the options of GPT-2 configurations that it does not implement.
    """

    def __init__(self, hf_model: PreTrainedModel, dtype: torch.dtype = torch.float64) -> None:
        config = hf_model.config
        if config.activation_function != "gelu_new" or not config.scale_attn_weights:
            raise ValueError("the GPT-2 reference knows gelu_new and scaled attention only")
        if config.scale_attn_by_inverse_layer_idx or config.add_cross_attention:
            raise ValueError("the GPT-2 reference knows no layer-wise attention scale and no cross-attention")
        self.weights = {name: tensor.detach().to(dtype) for name, tensor in hf_model.state_dict().items()}
        self.n_layers = config.n_layer
        self.n_heads = config.n_head
        self.d_model = config.n_embd
        self.d_head = self.d_model // self.n_heads
        self.eps = config.layer_norm_epsilon

    def _layer(self, layer: int, name: str) -> Tensor:
        return self.weights[f"transformer.h.{layer}.{name}"]

    def _layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        variance = (centered**2).mean(-1, keepdim=True)
        return centered / torch.sqrt(variance + self.eps) * weight + bias

    def run(self, token_ids: Tensor) -> "Gpt2Run":
        """Run one prompt (a 1-D tensor of token ids, no padding)."""
        n_pos, n_heads, d_head = len(token_ids), self.n_heads, self.d_head
        stream = self.weights["transformer.wte.weight"][token_ids] + self.weights["transformer.wpe.weight"][:n_pos]
        visible = torch.tril(torch.ones(n_pos, n_pos, dtype=torch.bool))
        x, patterns, values, subheads, attn_outs, activations, ffn_outs = [], [], [], [], [], [], []

        for layer in range(self.n_layers):
            x.append(stream[-1])
            normed = self._layer_norm(stream, self._layer(layer, "ln_1.weight"), self._layer(layer, "ln_1.bias"))
            qkv = normed @ self._layer(layer, "attn.c_attn.weight") + self._layer(layer, "attn.c_attn.bias")
            q, k, v = (part.reshape(n_pos, n_heads, d_head) for part in qkv.split(self.d_model, dim=-1))
            W_O = self._layer(layer, "attn.c_proj.weight").reshape(n_heads, d_head, self.d_model)
            b_O = self._layer(layer, "attn.c_proj.bias")

            attn_out = b_O.repeat(n_pos, 1)
            rows, split = [], []
            for h in range(n_heads):
                scores = q[:, h] @ k[:, h].T / math.sqrt(d_head)
                pattern = torch.softmax(scores.masked_fill(~visible, -math.inf), dim=-1)
                attn_out = attn_out + pattern @ v[:, h] @ W_O[h]
                rows.append(pattern[-1])
                split.append(torch.stack([pattern[-1, s] * (v[s, h] @ W_O[h]) for s in range(n_pos)]))

            mid = stream + attn_out
            normed = self._layer_norm(mid, self._layer(layer, "ln_2.weight"), self._layer(layer, "ln_2.bias"))
            m = _gelu_new(normed @ self._layer(layer, "mlp.c_fc.weight") + self._layer(layer, "mlp.c_fc.bias"))
            ffn_out = m @ self._layer(layer, "mlp.c_proj.weight") + self._layer(layer, "mlp.c_proj.bias")
            stream = mid + ffn_out

            patterns.append(torch.stack(rows))
            values.append(v)
            subheads.append(torch.stack(split))
            attn_outs.append(attn_out[-1])
            activations.append(m[-1])
            ffn_outs.append(ffn_out[-1])

        subhead_values = torch.stack(subheads)
        return Gpt2Run(
            reference=self,
            x=torch.stack(x),
            pattern=torch.stack(patterns),
            v=torch.stack(values),
            subhead_values=subhead_values,
            head_outputs=subhead_values.sum(dim=2),
            attn_out=torch.stack(attn_outs),
            ffn_out=torch.stack(ffn_outs),
            activations=torch.stack(activations),
            final=stream[-1],
        )


@dataclass(frozen=True)
class Gpt2Run:
    """What one prompt gave at its last position, and the increases of log p(target) in nats.

    `x` [layer, d_model] layer inputs; `pattern` [layer, head, pos]; `v` [layer, pos, head, d_head] with b_V;
    `subhead_values` [layer, head, pos, d_model]; `head_outputs` [layer, head, d_model] without b_O; `attn_out`,
    `ffn_out` [layer, d_model] with their biases; `activations` [layer, d_mlp]; `final` [d_model].

    `final_norm="frozen"`: the final norm's scale computed once from `final`, each vector still centered by its
    own mean; `"own"`: recomputed for each vector. `bias=False` leaves out ln_f's bias and b_U.
    """

    reference: Gpt2Reference
    x: Tensor
    pattern: Tensor
    v: Tensor
    subhead_values: Tensor
    head_outputs: Tensor
    attn_out: Tensor
    ffn_out: Tensor
    activations: Tensor
    final: Tensor

    def logits(self, y: Tensor, *, final_norm: FinalNorm = "frozen", bias: bool = True) -> Tensor:
        """Read residual vectors [..., d_model] out as logits [..., vocab]."""
        weights = self.reference.weights
        source = self.final if final_norm == "frozen" else y
        scale = 1.0 / torch.sqrt(source.var(-1, correction=0, keepdim=True) + self.reference.eps)
        normed = (y - y.mean(-1, keepdim=True)) * scale * weights["transformer.ln_f.weight"]
        if not bias:
            return normed @ weights["lm_head.weight"].T
        logits = (normed + weights["transformer.ln_f.bias"]) @ weights["lm_head.weight"].T
        return logits + weights["lm_head.bias"] if "lm_head.bias" in weights else logits

    @property
    def log_probs(self) -> Tensor:
        """The model's own log-probabilities at the last position, [vocab]."""
        return torch.log_softmax(self.logits(self.final), dim=-1)

    def _increase(self, part: Tensor, base: Tensor, target: int, final_norm: FinalNorm, bias: bool) -> Tensor:
        after = torch.log_softmax(self.logits(base + part, final_norm=final_norm, bias=bias), dim=-1)
        before = torch.log_softmax(self.logits(base, final_norm=final_norm, bias=bias), dim=-1)
        return after[..., target] - before[..., target]

    def layer_increases(
        self, target: int, *, final_norm: FinalNorm = "frozen", bias: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Of every attention layer over x, and of every FFN over x + attention: [layer] each."""
        attn, ffn = [], []
        for layer in range(self.reference.n_layers):
            x, attn_out, ffn_out = self.x[layer], self.attn_out[layer], self.ffn_out[layer]
            attn.append(self._increase(attn_out, x, target, final_norm, bias))
            ffn.append(self._increase(ffn_out, x + attn_out, target, final_norm, bias))
        return torch.stack(attn), torch.stack(ffn)

    def head_increases(self, target: int, *, final_norm: FinalNorm = "frozen", bias: bool = True) -> Tensor:
        """Of every head over x: [layer, head]."""
        layers = range(self.reference.n_layers)
        return torch.stack([self._increase(self.head_outputs[i], self.x[i], target, final_norm, bias) for i in layers])

    def subhead_increases(self, target: int, *, final_norm: FinalNorm = "frozen", bias: bool = True) -> Tensor:
        """Of every head's part moved from every position, over x: [layer, head, pos]."""
        layers = range(self.reference.n_layers)
        return torch.stack(
            [self._increase(self.subhead_values[i], self.x[i], target, final_norm, bias) for i in layers]
        )

    def neuron_increases(
        self, target: int, layer: int, *, final_norm: FinalNorm = "frozen", bias: bool = True
    ) -> Tensor:
        """Of every neuron of one FFN over x + attention: [d_mlp]."""
        fc2 = self.reference.weights[f"transformer.h.{layer}.mlp.c_proj.weight"]
        parts = self.activations[layer][:, None] * fc2
        return self._increase(parts, self.x[layer] + self.attn_out[layer], target, final_norm, bias)


def largest_difference(hf_model: PreTrainedModel, token_ids: Tensor) -> float:
    """Largest difference of log-probabilities at the last position from Hugging Face's, in float64."""
    hf_model = copy.deepcopy(hf_model).double()
    with torch.no_grad():
        theirs = torch.log_softmax(hf_model(token_ids[None]).logits[0, -1], dim=-1)
    return (Gpt2Reference(hf_model).run(token_ids).log_probs - theirs).abs().max().item()


if __name__ == "__main__":
    from families import PROMPT_IDS, build

    print(f"{largest_difference(build('gpt2'), torch.tensor(PROMPT_IDS)):.1e}")
