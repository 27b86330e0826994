"""The one error a user can mend: what was asked for cannot be done, and the message says how to ask differently."""


class InputError(ValueError):
    """The input is wrong in a way the caller can mend; the message gives cause, values and remedy in one sentence."""
