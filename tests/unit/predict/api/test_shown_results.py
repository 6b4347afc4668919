"""What a notebook shows of predictions: figures, and HTML in which foreign names are text."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from predicted_runs import PROFILE, run_like
from profile_factory import ring_fit

from calibrate.profile.profile import write_profile
from paradl_bench.core.frames import Drawn, Shown
from paradl_bench.core.terminal.pictures import draw_line, new_figure
from predict import load_profile
from predict.api.loaded_profile import LoadedProfile

HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m$x$"


@pytest.fixture
def profile(tmp_path: Path) -> LoadedProfile:
    operations = ("all_reduce", "all_gather", "reduce_scatter", "send_recv", "broadcast")
    fits = tuple(map(ring_fit, operations))
    write_profile(tmp_path / "profile.json", msgspec.structs.replace(PROFILE, communication=fits))
    return load_profile(tmp_path / "profile.json")


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.said = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.said += data


def results(profile: LoadedProfile, model: str, run: Path) -> list[Shown]:
    point = profile.predict(model, "d2", batch=8)
    sweep = profile.sweep(model, "data,filter", ranks=[2, 4], batch=8)
    last = profile.profile.network[model].layers[-1].name
    return [
        point,
        point.explain(),
        sweep,
        profile.search(model, ranks=2, batch=8, memory="100MiB"),
        profile.what_if(model, "d2", batch=8, vary=["bandwidth=1,2", "device=h100-sxm,a100-sxm-80gb"]),
        profile.what_if(model, "data", ranks=[2, 4], batch=8, replace=f"{last}=none"),
        profile.timeline(model, "p2", batch=8, micro_batches=2),
        profile.validate(run, force=True),
    ]


def test_everything_that_can_be_drawn_is_drawn(profile: LoadedProfile, tmp_path: Path) -> None:
    run = run_like(tmp_path / "run", "d2", 8)
    for result in results(profile, "chain", run):
        assert repr(result) == f"<{type(result).__name__}: {result.title}>"
        if isinstance(result, Drawn):
            figure = result.plot()
            assert any(axes.has_data() for axes in figure.get_axes()), type(result)
            assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


def test_a_sweep_is_drawn_with_efficiency_and_its_subject(profile: LoadedProfile) -> None:
    figure = profile.sweep("chain", "serial,data", ranks=[2, 4], batch=8).plot()
    of_time, of_efficiency = figure.get_axes()
    assert (of_time.get_ylabel()[:9], of_efficiency.get_ylabel()[:10]) == ("iteration", "efficiency")
    said = figure.get_suptitle()
    assert said.startswith("chain, batch 8 to 16, ")
    assert said.endswith("/profile.json")


def test_doubled_things_are_bars_of_one_chart(profile: LoadedProfile) -> None:
    found = profile.what_if("chain", ["d2", "d4"], batch=8)
    (axes,) = found.plot().get_axes()
    speedups = [row.speedup_over_base for row in found.rows if row.varied]
    assert [bar.get_width() for bar in axes.patches] == speedups  # type: ignore[attr-defined]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["d2, batch 8", "d4, batch 8"]
    values = profile.what_if("chain", "d2", batch=8, vary=["bandwidth=2,4", "latency=0.5"])
    assert len(values.plot().get_axes()) == 2, "a panel for each quantity"


def test_a_line_of_one_point_has_a_bar() -> None:
    panel = new_figure(4, 4).subplots()
    draw_line(panel, [2], [1.0], [(0.5, 2.0)], "black", "alone")
    assert [0.5, 2.0] in [line.get_ydata().tolist() for line in panel.get_lines()]
    assert not panel.collections
    draw_line(panel, [2, 4], [1.0, 1.0], [(0.5, 2.0), (0.5, 2.0)], "black", "several")
    assert len(panel.collections) == 1


def test_names_from_files_are_text_in_html(profile: LoadedProfile, tmp_path: Path) -> None:
    network = msgspec.structs.replace(PROFILE.network["chain"], name=HOSTILE)
    times = [msgspec.structs.replace(time, model=HOSTILE) for time in PROFILE.model_times]
    changed = msgspec.structs.replace(
        PROFILE, network={HOSTILE: network}, model_times=tuple(times), notes=(f"note {HOSTILE}",)
    )
    path = tmp_path / "hostile.json"
    write_profile(path, changed)
    loaded = load_profile(path)
    point = loaded.predict(HOSTILE, "d2", batch=8)
    shown: list[Shown] = [loaded, point, point.explain(), loaded.timeline(HOSTILE, "d2", batch=8)]
    for result in shown:
        html = result._repr_html_()
        found = Tags(html)
        assert "img" not in found.tags
        assert "<img src=x onerror=alert(1)>$x$" in found.said
        assert "\x1b" not in html
        if isinstance(result, Drawn) and result is not loaded:
            result.plot()._repr_png_()  # type: ignore[attr-defined]


def test_html_shows_all_columns_that_are_named(profile: LoadedProfile, tmp_path: Path) -> None:
    for result in results(profile, "chain", run_like(tmp_path / "run", "d2", 8)):
        assert {"table", "p"} <= Tags(result._repr_html_()).tags
        assert set(result._columns) <= set(result.to_frame().columns)
