"""What limits each run of a validation, as ``predict diagnose`` says it of one."""

from __future__ import annotations

from paradl_bench.core.errors import UserError
from paradl_bench.plan.strategy import parse_strategy
from predict.prediction.prediction import Predictor
from predict.validation.diagnosis.against_run import held_against
from predict.validation.diagnosis.diagnosis import Diagnostician
from predict.validation.diagnosis.findings import Finding
from predict.validation.diagnosis.limitations import AT_LEAST
from predict.validation.run_predictors import RunPredictors
from predict.validation.runs import Run
from predict.validation.validation_report import PREDICTOR, RunLimitation
from predict.workload import Configuration, evaluator_named


def limitations_of(run: Run, predictors: RunPredictors) -> tuple[RunLimitation, ...] | str:
    """Limitations that are present or may be, those that take most first; or why there is no diagnosis."""
    about = run.description
    point = Configuration(strategy=parse_strategy(about.strategy), settings=about.settings)
    try:
        diagnostician = Diagnostician(Predictor(predictors.costs_of(run), evaluator_named(PREDICTOR)), AT_LEAST)
        case = diagnostician.case_of(point)
    except UserError as error:
        return str(error)
    found = held_against(diagnostician.diagnose(case), case, run).findings
    return tuple(_of_run(run, finding) for finding in found if finding.state in ("present", "possible"))


def _of_run(run: Run, finding: Finding) -> RunLimitation:
    about, limitation = run.description, finding.limitation
    return RunLimitation(
        run=str(run.path),
        model=about.model,
        strategy=about.strategy,
        batch=about.settings.batch,
        limitation=limitation.name,
        category=limitation.category,
        comes_of=limitation.comes_of,
        phases=limitation.phases,
        state=finding.state,
        share=finding.share,
        share_interval=None if finding.seconds_s is None else finding.share_interval,
        evidence=finding.evidence,
    )
