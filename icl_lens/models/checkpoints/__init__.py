"""Find the files of a model, convert GGUF files, and notice files that changed.

1. `resolve` finds the folder of a bundled or `installed` model, a local one, or one on the Hub.
2. `gguf` converts a GGUF file into such a folder, with the settings that `gguf_header` reads and
   the tokenizer that `gguf_tokenizer` rebuilds.
3. `file_digests` recognizes files that were replaced or damaged. `quiet` keeps loading quiet.
"""
