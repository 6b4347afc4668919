"""``predict search``: from the options to the strategies worth running, each with its settings and commands."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from paradl_bench.core.cache_keys import Answers
from paradl_bench.core.errors import UserError
from paradl_bench.core.units import parse_counts, parse_ranks
from paradl_bench.plan.axes.registry import option_types
from paradl_bench.plan.settings import CHOICES_WITHIN_A_LIMIT, MEMORY_CHOICES, PlanSettings
from paradl_bench.plan.strategy import MAX_DEGREE, parse_strategy
from paradl_bench.records.kernel_settings import KernelSettings, flag_of
from paradl_bench.strategies.exchange.options import bucket_limits
from paradl_bench.strategies.spatial.axis import SpatialOptions
from predict.costs.cost_model import CostModel
from predict.costs.input.input_terms import OF_INPUT
from predict.costs.kinds.state_copy import have_prices
from predict.prediction.buckets.advice import parse_caps
from predict.prediction.prediction import Prediction, Predictor
from predict.prediction.request import MEASURED, limit_memory, read_model, settings_of
from predict.prediction.stage_balance import CUT_BY
from predict.search.account import Searched
from predict.search.candidates.mirrored import mirrored_dims
from predict.search.candidates.refusals import Held
from predict.search.candidates.space import Space, find_space, held_choices
from predict.search.chances import chances_of_best, pareto
from predict.search.pricing.memory_bound import bounds_of
from predict.search.ranking import Exact, Ranker
from predict.workload import Evaluator, evaluator_named, evaluators

MOST_PREDICTIONS = 60
"""Candidates that are predicted where nobody says, of a network of ordinary size."""
_LAYERS_PREDICTED = 60_000
"""Layers of all that are predicted, where nobody says how many these are."""
_FEWEST_PREDICTIONS = 8
_ALIKE = 64
"""Times of predictions that are kept for others that are simulated alike."""
_PASSED_ON = ("network", "sequence", "cluster", "device", "optimizer", "dtype", "backend", "dataset_samples", "price")
"""Options of the search that both hold for predicting one of its strategies, where they were given."""
_UNPRICED = "the optimizer's state in host memory, whose copies were not measured (--offload)"
_OF_PREDICTIONS = ("fusion", "fusion_buffer", "fusion_timeout", "dilate", "slow_rank")
"""Options of a prediction alone, which a search has none of."""
_NOT_OF_RUNS = ("network", "sequence", "cluster", "device", "dataset_samples", "price")


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A strategy with its settings.

    Attributes:
        place: from 1, by iteration.
        probability_best: that this strategy is the fastest of those predicted, each with its fastest settings; null on
            further rows of a strategy.
        pareto: whether nothing that was predicted is as fast, needs as little memory and as few rank-hours, and is
            better in one of them.
        estimate_s: what the search chose it by.
        predict_command, train_command: that predict it, and run it; the latter null of networks of which only times
            were imported: nothing tells their input, nor whether a model of that name is theirs.
        prediction: what ``predict`` says of it.
    """

    place: int
    probability_best: float | None
    pareto: bool
    estimate_s: float
    predict_command: str
    train_command: str | None
    prediction: Prediction

    def record(self) -> dict[str, Any]:
        """The fields, as JSON and CSV hold them."""
        return {**msgspec.structs.asdict(self), "prediction": self.prediction.record()}


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of a search.

    Attributes:
        memory_bytes_per_rank: the limit; null where nobody says.
        rows: the fastest strategies, each with its fastest settings; with ``--pareto`` what else is in the Pareto set
            too. The fastest first.
        probability_of_others: that a strategy is the best that was predicted and is in no row.
        further: predictions of the Pareto set that are in no row.
    """

    model: str
    batch: int
    memory_bytes_per_rank: float | None
    rows: tuple[Row, ...]
    probability_of_others: float
    further: int
    searched: tuple[Searched, ...]

    def record(self) -> dict[str, Any]:
        """The fields, as JSON holds them."""
        return {**msgspec.structs.asdict(self), "rows": [row.record() for row in self.rows]}


def search(
    options: Mapping[str, Any], advance: Callable[[], None] = lambda: None, costs: CostModel | None = None
) -> Answer:
    """The answer of :func:`whole_search`, which says what it takes and raises."""
    return whole_search(options, advance, costs)[0]


def whole_search(
    options: Mapping[str, Any], advance: Callable[[], None] = lambda: None, costs: CostModel | None = None
) -> tuple[Answer, tuple[Ranker, ...]]:
    """Search every number of ranks that the options ask for; the answer, and what each of them was ranked by.

    Args:
        advance: called after each exact prediction.
        costs: where they have been read; None to read what the options name.

    Raises:
        UserError: whatever of the options, files or limits is wrong, in one line; nothing fits anywhere.
    """
    evaluator, estimated_by = _evaluator_of(options["evaluator"])
    costs = costs or read_model(options, evaluator)
    batches = parse_counts(options["batch"], "--batch")
    if len(batches) > 1:
        raise UserError(f"--batch {options['batch']}: predict search takes one mini-batch size")
    limit = limit_memory(costs, options["memory"])
    settings = settings_of(costs, options)(batches[0])
    caps = parse_caps(options["caps"])
    chosen = [name for name in (*MEMORY_CHOICES, *CHOICES_WITHIN_A_LIMIT) if options[name] is not None]
    # What has no price is left out, as if nobody knew the limit within which it is tried.
    limited = limit is not None and have_prices(costs.profile)
    held = held_choices({name: getattr(settings, name) for name in chosen}, limited=limited)
    estimating = estimated_by(costs)
    like = mirrored_dims(costs.profile, costs.network, settings.of(SpatialOptions).spatial_until)
    answered = {"dataset_samples": options["dataset_samples"], "price_per_rank_hour": options["price"]}
    predictor = Predictor(costs, evaluator, **answered, alike=Answers(_ALIKE))
    unpriced = (_UNPRICED,) if limited != (limit is not None) and options["offload"] is None else ()
    exact: list[Exact] = []
    rankers: list[Ranker] = []
    refused: list[UserError] = []
    for ranks in parse_ranks(options["ranks"]):
        try:
            _check_ranks(costs, ranks)
            computed_in = costs.dtype, costs.kernel_settings
            asked = settings, ranks, caps, held, computed_in, like
            most = options["predictions"] or most_predictions(len(costs.network.layers))
            ranker = Ranker(estimating, _spaces(costs, *asked), limit, most=most, rows=options["top"])
            exact += ranker.rank(predictor, advance)
            rankers.append(ranker)
        except UserError as error:
            refused.append(error)
    if not rankers:
        raise refused[0]
    rows, others, further = rows_of(exact, options)
    answer = Answer(
        model=costs.network.name,
        batch=batches[0],
        memory_bytes_per_rank=limit,
        rows=rows,
        probability_of_others=others,
        further=further,
        searched=tuple(_account(ranker, unpriced) for ranker in rankers),
    )
    return answer, tuple(rankers)


def _account(ranker: Ranker, not_searched: tuple[str, ...]) -> Searched:
    account = ranker.account()
    return msgspec.structs.replace(account, not_searched=(*account.not_searched, *not_searched))


def _spaces(
    costs: CostModel,
    settings: PlanSettings,
    ranks: int,
    caps: tuple[float, ...],
    held: tuple[Held, ...],
    computed_in: tuple[str, str],
    like: tuple[int, ...],
) -> Callable[[float], Space]:
    """From bytes of a rank's memory to the candidates that may fit: the same, whatever links and devices there are."""

    def find(within: float) -> Space:
        choices = tuple(tuple(choice.items()) for choice in held)
        known = "candidates", settings, ranks, caps, choices, computed_in, like, within
        bounding = partial(bounds_of, costs) if math.isfinite(within) else None
        asked = settings, ranks, caps, held, computed_in, like, bounding, within
        return costs.plans.found.once(known, partial(find_space, costs.network, *asked)).counted_anew()

    return find


def most_predictions(layers: int) -> int:
    """How many candidates are predicted where nobody says, of a network of so many layers.

    A prediction takes as long as the network has layers, and so does the walk of a plan's memory.
    """
    return min(max(_LAYERS_PREDICTED // max(layers, 1), _FEWEST_PREDICTIONS), MOST_PREDICTIONS)


def _check_ranks(costs: CostModel, ranks: int) -> None:
    """Refuse more ranks than there are; said once, before candidates are refused each for a reason of its own."""
    if ranks > MAX_DEGREE:
        raise UserError(f"--ranks {ranks}: predict search takes at most {MAX_DEGREE}, as strategies do")
    if costs.cluster is not None:
        costs.cluster.level_of(ranks)


def _evaluator_of(name: str) -> tuple[Evaluator, Callable[[CostModel], CostModel]]:
    """The evaluator of a name, and the costs by which candidates are estimated from below for it."""
    evaluator = evaluator_named(name)
    if evaluator.estimated_by is None:
        known = " or ".join(sorted(name for name, other in evaluators().items() if other.estimated_by is not None))
        raise UserError(
            f"--evaluator {name}: predict search has lower bounds of candidates only for {known}: give one of them"
        )
    return evaluator, evaluator.estimated_by


def rows_of(exact: Sequence[Exact], options: Mapping[str, Any]) -> tuple[tuple[Row, ...], float, int]:
    """The rows, the probability of strategies that are in none, and how much of the Pareto set is in none."""
    exact = sorted(exact, key=lambda candidate: candidate.timed.iteration_s)
    compared = [_compared(candidate.prediction) for candidate in exact]
    frontier = pareto(compared)
    first: dict[str, int] = {}
    for index, candidate in enumerate(exact):
        first.setdefault(candidate.prediction.strategy, index)
    # Each strategy with its fastest settings alone: how many others were tried says nothing of how fast it is.
    fastest = [exact[index] for index in first.values()]
    chances = chances_of_best([candidate.timed for candidate in fastest], [candidate.layers for candidate in fastest])
    of_strategy = dict(zip(first, chances.tolist(), strict=True))
    shown = list(first.values())[: options["top"]]
    # Settings that come to the same, as bucket sizes that all hold the whole model, are one row.
    further = list({compared[index]: index for index in reversed(range(len(exact))) if frontier[index]}.values())
    told = {compared[index] for index in shown}
    further = sorted(index for index in further if compared[index] not in told)
    asked_for = further if options["pareto"] else []
    rows = [
        Row(
            place=place,
            probability_best=of_strategy[exact[index].prediction.strategy] if index in first.values() else None,
            pareto=frontier[index],
            estimate_s=exact[index].estimate_s,
            predict_command=command_of("predict", exact[index].prediction, options),
            train_command=_train_command(exact[index].prediction, options),
            prediction=exact[index].prediction,
        )
        for place, index in enumerate(sorted((*shown, *asked_for)), start=1)
    ]
    named = {row.prediction.strategy for row in rows if row.probability_best is not None}
    others = float(sum(chance for name, chance in of_strategy.items() if name not in named))
    return tuple(rows), others, len(further) - len(asked_for)


def _compared(prediction: Prediction) -> tuple[float, ...]:
    """Time, memory and rank-hours."""
    return prediction.iteration_s, float(prediction.memory.memory_bytes), prediction.use.rank_hours_per_million_samples


def _train_command(prediction: Prediction, options: Mapping[str, Any]) -> str | None:
    return command_of("train", prediction, options) if prediction.input_shape else None


def command_of(program: str, prediction: Prediction, options: Mapping[str, Any]) -> str:
    """The command that predicts, or trains, what a row says."""
    if program == "predict":
        words = ["predict", "--from-profile", str(options["profile"]), "--model", prediction.model]
    else:
        # One extent is that of a text.
        flag = "--sequence" if len(prediction.input_shape) == 1 else "--input-shape"
        shape = "x".join(map(str, prediction.input_shape))
        words = ["paradl-bench", "train", prediction.model, flag, shape]
    words += ["--strategy", prediction.strategy, "--batch", str(prediction.batch)]
    strategy = parse_strategy(prediction.strategy)
    axes = {shown.name for axis in strategy.axes for kind in axis.declared.options for shown in kind.shown}
    of_others = {shown.name for kind in option_types() for shown in kind.shown} - axes
    shown = {name: text for name, text in prediction.options.items() if name not in of_others}
    if shown.pop("cut_by", None) == CUT_BY:
        shown["stages"] = MEASURED
    for name, text in shown.items():
        words += [f"--{name.replace('_', '-')}", text]
    if prediction.bucket_cap_bytes != bucket_limits(None)[1]:
        words += ["--bucket-cap-mb", f"{prediction.bucket_cap_bytes / 1024**2:.12g}"]
    given: dict[str, object] = {name: options[name] for name in _PASSED_ON if options.get(name) is not None}
    if program == "train":
        given = {name: value for name, value in given.items() if name not in _NOT_OF_RUNS}
        given |= {"optimizer": prediction.optimizer, "dtype": prediction.dtype}
    words += _kernel_flags(program, prediction, options)
    if program == "predict":
        words += _input_flags(options)
        given |= {name: options[name] for name in _OF_PREDICTIONS if options.get(name) is not None}
        words += ["--spread"] if options.get("spread") else []
        words += ["--evaluator", prediction.evaluator] if prediction.evaluator != "simulate" else []
    for name, value in given.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words if program == "predict" else [*words, "-o", "DIR"])


def _input_flags(options: Mapping[str, Any]) -> list[str]:
    """Of the input side, as the search was given it."""
    flags = {name: flag for name, flag in OF_INPUT.items() if name != "from_disk" and options[name] is not None}
    words = [word for name, flag in flags.items() for word in (flag, str(options[name]))]
    return [*words, OF_INPUT["from_disk"]] if options["from_disk"] else words


def _kernel_flags(program: str, prediction: Prediction, options: Mapping[str, Any]) -> list[str]:
    """Of a run those that are on; of a prediction those that were given, since it chooses as the search did."""
    names = KernelSettings.__struct_fields__
    if program == "train":
        return [flag_of(name) for name in names if name in prediction.kernel_settings.split("+")]
    given = {name: options[name] for name in names if options[name] is not None}
    return [flag_of(name) if value else f"--no-{flag_of(name)[2:]}" for name, value in given.items()]
