"""Convert text to tokens and track the position of every part.

Text:

1. `prompt` renders demonstrations and a query, and counts the character span of each text and
   label; `plain_text` is a text without demonstrations. `prompt_list` prints a list in short.
2. `chat_turns` derives a template from the tokenizer's own, which `chat_template` renders.

Tasks:

3. `tasks` finds a task by name. `word_task` takes texts from word lists and `text_task` from
   labeled data (`datasets`); `draw` draws those of one prompt, `class_labels` gives the labels, and
   `labeled_task` makes prompts of both. `pair_task` makes prompts of pairs. `row_counts` says how
   many rows of the data are used, and `name_order` orders names whatever order they came in.
4. `donors` makes prompts in which one thing is exchanged; `same_length` picks texts of equally many
   tokens.

Tokens:

5. `tokenize` converts prompts to a right-padded `batch`, which stores the token that scores each
   label; `batch_checks` are the checks of functions that take one, and `batch_state` is how files
   store it. `beginning` is how prompts begin.
6. `token_alignment` maps each text and label to its tokens by character offsets; `label_tokens`
   finds where labels that begin alike part. `decisions` is what a batch stores of such labels, and
   `decision_rows` selects its rows and columns. `roles` names the roles of tokens.
7. `token_ids` checks ids and positions that users give; `token_rows` pads rows of ids.
"""
