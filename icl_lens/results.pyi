import pathlib
import typing

from .analyses.atlas.head_atlas_result import HeadAtlas as HeadAtlas
from .analyses.explanation.comparison import Comparison as Comparison
from .analyses.explanation.result import Explanation as Explanation
from .analyses.model_comparison import ModelComparison as ModelComparison
from .analyses.pair_check import PairCheck as PairCheck
from .analyses.task_check import TaskCheck as TaskCheck
from .analyses.trace_result import Trace as Trace
from .analyses.two_towers_result import TwoTowers as TwoTowers
from .measures.circuit import Circuit as Circuit
from .measures.controlled_ablation_result import ControlledAblation as ControlledAblation
from .measures.demonstration_effects import DemonstrationEffects as DemonstrationEffects
from .measures.effects import HeadEffects as HeadEffects
from .measures.generation import Generations as Generations
from .measures.head_overlap import HeadOverlap as HeadOverlap
from .measures.head_to_head_effects import HeadToHeadEffects as HeadToHeadEffects
from .measures.locate_result import LocatedHeads as LocatedHeads
from .measures.mean_score_parts import MeanScoreParts as MeanScoreParts
from .measures.saliency import SaliencyFlow as SaliencyFlow
from .measures.vector_gains import VectorGains as VectorGains
from .metrics import Agreement as Agreement
from .reading.attention_score_parts import ScoreContrast as ScoreContrast
from .reading.attention_score_parts import ScoreParts as ScoreParts
from .reading.copying import HeadCopying as HeadCopying
from .reading.increases import LayerIncreases as LayerIncreases
from .reading.label_scores import LabelScores as LabelScores
from .reading.qk_metric import QueryKeyMetric as QueryKeyMetric
from .reading.repeated_tokens import RepeatedTokenScores as RepeatedTokenScores
from .reading.search import TopHeads as TopHeads
from .reading.search import TopSubheads as TopSubheads
from .reading.value_parts import ValueParts as ValueParts
from .report.live_view.state import LiveState as LiveState

def load(path: str | pathlib.Path) -> typing.Any: ...
