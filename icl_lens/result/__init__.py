"""Define what a result is: the base class of all results (`base`), their tables (`tables`), and
their files (`stored`).

`icl_lens.results` lists the classes of results, each of which is defined beside the function that
returns it.
"""
