"""Loading models, and every difference between model classes, families and TransformerLens versions."""

from icl_lens.models.heads import Head
from icl_lens.models.load import bundled_models, load_model
from icl_lens.models.norms import NormView, probe_norm
from icl_lens.models.scores import ScoreView
from icl_lens.models.view import ModelView, tl_version

__all__ = ["Head", "ModelView", "NormView", "ScoreView", "bundled_models", "load_model", "probe_norm", "tl_version"]
