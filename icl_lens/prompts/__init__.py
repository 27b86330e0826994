"""Text to tokens, with the position of everything.

1. `prompt`: demonstrations and a query become a text; where each text and label stands is counted while it is put
   together, never searched for.
2. `tasks`: words and sentence datasets become many such prompts.
3. `batch`: prompts become one right-padded tensor of tokens (`PromptBatch`): character offsets of the whole prompt say
   which tokens a label has, and by which token it is scored.
"""
