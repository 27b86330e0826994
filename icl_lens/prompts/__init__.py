"""Text to tokens, with the position of everything.

1. `prompt`: demonstrations and a query become a text; where each text and label stands is counted while it is put
   together, never searched for.
2. `tasks`: words and sentence datasets become many such prompts.
3. `spelling`: character offsets of the whole prompt say which tokens each text and label has.
4. `tokenize` (and `free`, for texts without demonstrations): prompts become one right-padded tensor of tokens, a
   `PromptBatch` (`batch`), which knows by which token each label is scored.
"""
