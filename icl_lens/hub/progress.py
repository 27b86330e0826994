"""Progress bars of downloads."""


def download_bars(shown: bool) -> None:
    """Switches the bars of downloads on or off, whatever was imported before.

    Set HF_HUB_DISABLE_PROGRESS_BARS in the environment to have the last word. Bars that are on are still drawn in a
    terminal only.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        enable_progress_bars() if shown else disable_progress_bars()
