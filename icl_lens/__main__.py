"""`python -m icl_lens`, the same as `icl-lens`."""

from icl_lens.cli import main

main()
