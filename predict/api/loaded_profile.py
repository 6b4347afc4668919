"""``load_profile``: all that the commands of ``predict`` answer, from Python. Loads what it needs when it is called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrate.api import CalibratedProfile, PathLike

if TYPE_CHECKING:
    from paradl_bench.core.terminal.keywords import Asked
    from predict.api.explored import ExplorePage
    from predict.api.results import OnePrediction, Predictions, ReplacedLayers, Search, Validation, WhatIf
    from predict.api.timeline import Timeline

Texts = str | Sequence[str]
Counts = int | str | Sequence[int]


def load_profile(path: PathLike) -> LoadedProfile:
    """Read a profile that ``calibrate fit`` wrote.

    Raises:
        UserError: the file cannot be read, or a field is wrong. The message names it.
    """
    return LoadedProfile(path)


class LoadedProfile(CalibratedProfile):
    """A profile to predict from.

    Each method takes the options of the command with its name as keywords, with underscores: ``evaluator="paradl"``,
    ``bucket_cap_mb=64``, ``cluster="site.yaml"``. A wrong option raises a UserError with the command's message.
    """

    def predict(self, model: str, strategy: str, *, batch: int, **options: object) -> OnePrediction:
        """Predict one configuration, as ``predict`` does.

        Args:
            model: a model of the profile, a Hugging Face ``config.json``, or the name of a known language model.
            strategy: a strategy with its degrees: ``serial``, ``d64``, ``d8f4``.
            batch: samples in the global mini-batch.

        Raises:
            UserError: an option is wrong, or the options name more than one configuration.
        """
        from paradl_bench.core.errors import UserError
        from predict.api.results import OnePrediction

        answer = OnePrediction(self._ask("predict", options, model=model, strategy=strategy, batch=batch))
        if len(answer.predictions) != 1:
            raise UserError(
                f"strategy {strategy!r} and batch {batch} stand for several configurations: use sweep instead"
            )
        return answer

    def sweep(
        self, model: str, strategies: Texts, *, batch: Counts, ranks: Counts | None = None, **options: object
    ) -> Predictions:
        """Predict strategies over rank counts and batches, as ``predict`` does.

        Args:
            model: as in :meth:`predict`.
            strategies: with degrees (``d4``), or kinds (``data``, ``filter``) whose degrees ``ranks`` sets.
            batch: samples in the global mini-batch; with weak scaling at the fewest ranks, growing with them.
            ranks: numbers of ranks, as a list or as ``"2:1024:x2"``.

        Raises:
            UserError: an option is wrong, or no configuration is possible.
        """
        from predict.api.results import Predictions

        return Predictions(self._ask("predict", options, model=model, strategy=strategies, batch=batch, ranks=ranks))

    def search(self, model: str, *, ranks: Counts, batch: int, **options: object) -> Search:
        """Find the fastest strategies that fit in memory, as ``predict search`` does.

        Args:
            model: as in :meth:`predict`.
            ranks: one number or several, as in :meth:`sweep`.
            batch: samples in the global mini-batch.

        Raises:
            UserError: an option is wrong, or no strategy fits in memory.
        """
        from predict.api.results import Search
        from predict.prediction.utilisation import check_price
        from predict.search.command import refuse_searched
        from predict.search.search import search

        refuse_searched(name for name in options if options[name] is not None)
        asked = self._ask("predict search", options, model=model, ranks=ranks, batch=batch)
        check_price(asked.options["price"])
        return Search(search(asked.options), asked.command)

    def what_if(
        self, model: str, strategy: Texts, *, batch: Counts, vary: Texts = (), replace: Texts = (), **options: object
    ) -> WhatIf | ReplacedLayers:
        """Predict other links, devices, rank counts, batches or layers, as ``predict what-if`` does.

        Args:
            model, strategy, batch: as in :meth:`sweep`.
            vary: ``"bandwidth=0.1:10:log"``, ``"peak-flops=1,2,4"``; one or several. Without it and
                ``replace``, twice as much of everything is tried, what helps most first.
            replace: layers by a pattern of their names, and what stands in their place: ``"classifier.*=none"``.

        Raises:
            UserError: an option is wrong.
        """
        from predict.api.results import ReplacedLayers, WhatIf
        from predict.what_if.command import refuse_unlike_changes
        from predict.what_if.replacing import predict_replaced
        from predict.what_if.what_if import vary as predict_varied

        given: dict[str, object] = {"model": model, "strategy": strategy, "batch": batch}
        asked = self._ask("predict what-if", options, **given, vary=vary, replace=replace)
        refuse_unlike_changes(asked.options)
        if not replace:
            return WhatIf(predict_varied(asked.options), asked.command)
        strong = asked.options["scaling"] == "strong"
        return ReplacedLayers(predict_replaced(asked.options), asked.command, strong_scaling=strong)

    def timeline(self, model: str, strategy: str, *, batch: int, **options: object) -> Timeline:
        """When every task of one predicted iteration runs, as ``predict timeline`` shows it.

        Args:
            model, strategy, batch: as in :meth:`predict`.

        Raises:
            UserError: an option is wrong.
        """
        from predict.api.timeline import Timeline
        from predict.timeline.timeline_run import read_timeline

        asked = self._ask("predict timeline", options, model=model, strategy=strategy, batch=batch)
        return Timeline(read_timeline(asked.options), asked.command, str(self.path))

    def validate(
        self,
        runs: PathLike | Iterable[PathLike],
        *,
        cluster: PathLike | None = None,
        layers: str = "measured",
        force: bool = False,
    ) -> Validation:
        """Compare predictions with training runs, as ``predict validate`` does; nothing is written.

        Args:
            runs: directories that ``paradl-bench train`` wrote.
            cluster: a cluster file; None for the measured cluster.
            layers: where layer times come from, as for the option ``--layers``.
            force: also compare runs from another environment, and note it.

        Raises:
            UserError: no run is usable, or the profile lacks a run's model or environment.
        """
        from calibrate.api import paths_of
        from predict.api.results import Validation
        from predict.costs.compute.layer_source import parse_layers
        from predict.validation.validation import validate_runs

        cluster_path = None if cluster is None else Path(cluster)
        source = parse_layers(layers)
        paths = paths_of(runs)
        report = validate_runs(
            self.path, paths, cluster_path=cluster_path, force=force, layers_from=source, profile=self.profile
        )
        return Validation(report)

    def explore(self, model: str | None = None, **options: object) -> ExplorePage:
        """Serve the page of ``predict explore`` beside this script or notebook.

        Args:
            model: the model to begin with, as in :meth:`predict`; None for the profile's first model.
            options: options of the command: ``ranks=512``, ``batch=4096``, ``memory="80GiB"``. ``browser=True`` opens
                the browser.

        Raises:
            UserError: an option is wrong.
        """
        import webbrowser

        from paradl_bench.core.terminal.keywords import ask
        from predict.api.explored import ExplorePage
        from predict.validation.report.explore.command import explore

        given = {"model": model, "browser": False, **options}
        asked = ask(explore, "predict explore", [str(self.path)], given).options
        page = ExplorePage(asked)
        if asked["browser"]:
            webbrowser.open(page.address)
        return page

    def _ask(self, name: str, options: dict[str, object], **given: object) -> Asked:
        """The options of a command, with the profile that has been read."""
        from paradl_bench.core.terminal.keywords import ask
        from predict.cli import group
        from predict.prediction.request import READ_PROFILE

        _, _, inner = name.partition(" ")
        command = group.commands[inner] if inner else group
        asked = ask(command, name, ["--from-profile", str(self.path)], given | options)
        read: dict[str, Any] = {READ_PROFILE: self.profile}
        return asked._replace(options=asked.options | read)
