"""Real pages in a real browser: what is drawn, in which light and width, and what keys do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from browser import MARKS, NARROW, NEEDS_AXE, NEEDS_BROWSER, OVERFLOW, WIDE, seen_in, settled, violations
from predicted_runs import run_like
from profile_factory import make_network, make_profile, model_times, ring_fit

from calibrate.profile.collectives.communication import CommunicationPoint
from calibrate.profile.profile import write_profile
from predict.validation.report.command import options_unset
from predict.validation.report.gather import gather
from predict.validation.report.page import write_page

pytestmark = NEEDS_BROWSER
CHARTS = (
    *("ranking", "breakdown", "phases", "efficiency", "memory", "timeline", "waterfall", "entries", "limitations"),
    "fit_errors",
)
CHARTS += ("fits",)
_PAPER = "return getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every chart, and names that would break out of it."""
    folder = tmp_path_factory.mktemp("page")
    chain = make_network()
    points = tuple(
        CommunicationPoint(ranks=2, message_bytes=size, measured_s=s, fitted_s=1.1 * s, held_out_s=0.9 * s)
        for size, s in ((1024, 1.1e-4), (2**20, 2e-3), (2**24, 3e-2))
    )
    profile = make_profile(model_times=model_times(chain, common_sd=0.02), communication=(ring_fit(measured=points),))
    write_profile(folder / "profile.json", profile)
    run = run_like(folder / "<img src=x onerror=alert(1)>", "d2", 16, factor=1.2)
    asked = {"profile": folder / "profile.json", "model": "chain", "batch": "16", "strategy": "serial,d2,d4"}
    write_page(gather({**options_unset(), **asked}, [run]), str(folder / "page.html"), force=False)
    return folder / "page.html"


def opened(browser: Any, page: Path, *, width: int = WIDE, scheme: str = "light") -> None:
    seen_in(browser, width, scheme)
    browser.get(page.as_uri())


def view(browser: Any) -> tuple[float, float]:
    settled(browser)
    frame = browser.find_element("css selector", "#chart-timeline [data-from]")
    return float(frame.get_attribute("data-from")), float(frame.get_attribute("data-to"))


@pytest.mark.parametrize(("width", "scheme"), [(WIDE, "light"), (NARROW, "dark")])
def test_every_chart_is_drawn_without_an_error(browser: Any, page: Path, width: int, scheme: str) -> None:
    opened(browser, page, width=width, scheme=scheme)
    for name in CHARTS:
        chart = browser.find_element("id", f"chart-{name}")
        assert browser.execute_script(MARKS, chart) >= 2, name
        assert chart.size["width"] <= width
    assert browser.get_log("browser") == []
    assert browser.execute_script(OVERFLOW) <= 0
    assert not browser.find_elements("css selector", "img")


def test_no_request_leaves_the_file(browser: Any, page: Path) -> None:
    browser.get_log("performance")
    opened(browser, page)
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent"]
    assert asked == [page.as_uri()]
    # Its policy refuses what a script would ask for.
    refused = browser.execute_async_script(
        "fetch('http://127.0.0.1:9/').then(() => arguments[0]('sent'), () => arguments[0]('refused'))"
    )
    assert refused == "refused"
    assert any("Content Security Policy" in entry["message"] for entry in browser.get_log("browser"))


def test_light_and_dark_differ_and_both_can_be_read(browser: Any, page: Path) -> None:
    seen = {}
    for scheme in ("light", "dark"):
        opened(browser, page, scheme=scheme)
        ink = browser.execute_script("return getComputedStyle(document.querySelector('#chart-ranking svg text')).fill")
        seen[scheme] = tuple(
            sum(map(int, colour[4:-1].split(","))) / 3 for colour in (browser.execute_script(_PAPER), ink)
        )
    assert seen["light"][0] > 230 > 60 > seen["light"][1]
    assert seen["dark"][0] < 60 < 180 < seen["dark"][1]


def test_the_timeline_zooms_and_tells_by_keys_alone(browser: Any, page: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    opened(browser, page)
    frame = browser.find_element("css selector", "#chart-timeline [data-from]")
    whole = view(browser)
    frame.send_keys("+", "+")
    near = view(browser)
    assert near[1] - near[0] == pytest.approx((whole[1] - whole[0]) / 2.25)
    frame.send_keys(Keys.ARROW_RIGHT)
    assert view(browser)[0] > near[0]
    frame.send_keys(Keys.HOME)
    assert view(browser) == whole
    told = browser.find_element("css selector", "#chart-timeline .told")
    frame.send_keys("n")
    settled(browser)
    assert "source: measured" in told.text
    first = told.text
    frame.send_keys("n")
    settled(browser)
    assert told.text != first
    for button in browser.find_elements("css selector", "#chart-timeline button"):
        assert button.text
    browser.find_element("xpath", "//button[text()='Zoom in']").send_keys(Keys.ENTER)
    zoomed = view(browser)
    assert zoomed[1] < whole[1]
    # Neither is lost where the page becomes narrower.
    seen_in(browser, NARROW, "light")
    assert view(browser) == zoomed
    assert browser.find_element("css selector", "#chart-timeline .told").text != first
    assert browser.execute_script("return document.activeElement.closest('#chart-timeline') !== null")


def test_what_is_pointed_at_is_told(browser: Any, page: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    opened(browser, page)
    bar = browser.find_element("css selector", "#chart-timeline svg g[aria-label='bar'] rect")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", bar)
    ActionChains(browser).move_to_element(bar).perform()
    settled(browser)
    assert "takes" in browser.find_element("css selector", "#chart-timeline .told").text
    dot = browser.find_element("css selector", "#chart-ranking svg g[aria-label='dot'] path")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", dot)
    ActionChains(browser).move_to_element(dot).perform()
    settled(browser)
    assert "batch 16" in browser.find_element("css selector", "#chart-ranking svg g[aria-label='tip']").text


@NEEDS_AXE
@pytest.mark.parametrize(("width", "scheme"), [(WIDE, "light"), (WIDE, "dark"), (NARROW, "light")])
def test_axe_finds_no_barrier(browser: Any, page: Path, width: int, scheme: str) -> None:
    opened(browser, page, width=width, scheme=scheme)
    assert violations(browser) == {}
