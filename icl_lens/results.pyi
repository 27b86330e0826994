import pathlib
import typing

from .activations.label_scores import LabelScores as LabelScores
from .attribution.copying import HeadCopying as HeadCopying
from .attribution.increases import LayerIncreases as LayerIncreases
from .attribution.qk_metric import QueryKeyMetric as QueryKeyMetric
from .attribution.score_parts import ScoreContrast as ScoreContrast
from .attribution.score_parts import ScoreParts as ScoreParts
from .attribution.search import TopHeads as TopHeads
from .attribution.search import TopSubheads as TopSubheads
from .attribution.value_parts import ValueParts as ValueParts
from .interventions.controlled_ablation import ControlledAblation as ControlledAblation
from .interventions.debias import StrengthSearch as StrengthSearch
from .interventions.demonstration_effects import DemonstrationEffects as DemonstrationEffects
from .interventions.effects import Agreement as Agreement
from .interventions.effects import HeadEffects as HeadEffects
from .interventions.generation import Generations as Generations
from .interventions.head_edges import HeadToHeadEffects as HeadToHeadEffects
from .interventions.saliency import SaliencyFlow as SaliencyFlow
from .interventions.vector_gains import VectorGains as VectorGains
from .locate.circuit import Circuit as Circuit
from .locate.mean_effects import MeanEffects as MeanEffects
from .locate.mean_exchanges import MeanExchanges as MeanExchanges
from .locate.mean_score_parts import MeanScoreParts as MeanScoreParts
from .pair_behavior import PairCheck as PairCheck
from .report.comparison import Comparison as Comparison
from .report.explanation import Explanation as Explanation
from .report.model_comparison import ModelComparison as ModelComparison
from .report.two_towers import TwoTowers as TwoTowers
from .task_behavior import TaskCheck as TaskCheck

def load(path: str | pathlib.Path) -> typing.Any: ...
