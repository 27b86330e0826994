"""Convert text to tokens and track the position of every part.

1. `prompt`: renders demonstrations and a query as text and counts the character span of each text and label.
2. `tasks`: builds lists of prompts; `word_task` and `text_task` draw their texts from word lists and from labeled
   datasets (`datasets`).
3. `token_alignment`: maps each text and label to its tokens, using the character offsets of the full prompt.
4. `tokenize` (and `plain_text`, for texts without demonstrations): converts prompts to a right-padded `PromptBatch`
   (`batch`), which stores the token that scores each label.
"""
