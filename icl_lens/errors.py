"""What the user got wrong: one sentence with cause, values and remedy."""


class InputError(ValueError):
    """The input is wrong in a way the caller can mend; the message gives cause, values and remedy in one sentence.

    Example:
        >>> il.Prompt.parse("no colon here")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        icl_lens.errors.InputError: 'no colon here' has no colon standing alone, so no demonstration; write ...
    """
