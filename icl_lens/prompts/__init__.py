"""Convert text to tokens and track the position of every part.

1. `prompt`: renders demonstrations and a query as text and counts the character span of each text
   and label; `chat_turns` derives a template from the tokenizer's own.
2. `labeled_task`: builds prompts of the texts that `word_task` and `text_task` draw from word lists
   and from labeled datasets (`datasets`), with the labels of `class_labels`; `pair_task` builds
   them of pairs; `tasks` finds a task by name.
3. `token_alignment`: maps each text and label to its tokens, using the character offsets of the
   full prompt.
4. `tokenize` (with `plain_text` for texts without demonstrations): converts prompts to a
   right-padded `PromptBatch` (`batch`), which stores the token that scores each label. `token_rows`
   pads rows of ids; `batch_state` is how files store a batch.
"""
