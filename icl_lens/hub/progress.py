"""Progress bars for downloads."""


def download_bars(shown: bool) -> None:
    """Enable or disable the progress bars of downloads.

    The environment variable HF_HUB_DISABLE_PROGRESS_BARS takes precedence. Enabled bars appear only in a terminal.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        enable_progress_bars() if shown else disable_progress_bars()
