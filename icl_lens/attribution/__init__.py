"""Attribute the answer to parts of the forward pass, and describe what heads read and write.

1. `increases`: log p(answer | x + u) − log p(answer | x) of layers, heads, (head, position) parts
   and neurons u.
2. `search`: the largest increases without computing all of them. With a frozen norm, one dot
   product bounds each part; parts are evaluated exactly in the order of their bounds until no
   remaining bound can reach the top k.
3. `qk_metric`, `similarity`, `copying`: what heads compare, in general and on one prompt, and what
   they copy.
4. `score_parts`, `value_parts`, `reasons`: attention scores and values of a head, split by the
   components that wrote the layer's input.
"""
