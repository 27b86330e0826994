"""What each piece of the forward pass adds to the answer, and what heads read and write.

1. `increases`: log p(answer | x + u) − log p(answer | x) of layers, heads, (head, position) parts and neurons u.
2. `search`: the largest of them without computing all: with a frozen norm one dot product bounds each part; parts are
   evaluated exactly in the order of their bounds until the rest cannot matter.
3. `circuits`: values, keys and queries of a head, carried into the residual stream and read as words.
4. `attention`: how much the last position attends to each label.
5. `metric`, `similarity`, `copying`: what heads compare, in general and on one prompt, and what they copy.
"""
