"""A real browser without a window, and what is asked of its pages."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
REQUIRED = os.environ.get("PARADL_TEST_BROWSER") == "required"
NEEDS_BROWSER = pytest.mark.skipif(
    not REQUIRED and not (BROWSER and DRIVER and importlib.util.find_spec("selenium")),
    reason="needs chromium, chromedriver and selenium",
)
NARROW, WIDE = 400, 1100
OVERFLOW = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
MARKS = "return arguments[0].querySelectorAll('svg g:is([aria-label=bar], [aria-label=dot]) :is(rect, path)').length"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One for all tests of a file."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_page_load_timeout(30)
    yield driver
    driver.quit()


def seen_in(browser: Any, width: int, scheme: str) -> None:
    """Give pages this width, in pixels, and ``light`` or ``dark``."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    light = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", light)


def settled(browser: Any) -> None:
    """Wait for the next two frames, in which what was changed is drawn."""
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")


AXE = importlib.util.find_spec("axe_playwright_python")
NEEDS_AXE = pytest.mark.skipif(not REQUIRED and AXE is None, reason="needs axe-playwright-python")
_RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")
_CHECK = (
    "const [rules, done] = arguments;"
    "axe.run(document, {runOnly: rules, resultTypes: ['violations']}).then("
    "({violations, passes}) => done({passed: passes.length, violations}), error => done({error: String(error)}))"
)


def violations(browser: Any) -> dict[str, list[str]]:
    """What axe-core, which that package brings, finds wrong with the open page: elements by rule, with why."""
    assert AXE is not None
    (folder,) = AXE.submodule_search_locations or ()
    source = Path(folder, "axe.min.js").read_text(encoding="utf-8")
    # By the debugger's way, which a page's policy does not bind.
    browser.execute_cdp_cmd("Runtime.evaluate", {"expression": source})
    found = browser.execute_async_script(_CHECK, _RULES)
    assert found.get("passed", 0) > 0, found
    return {
        each["id"]: [f"{node['html'][:120]}: {node['failureSummary']}" for node in each["nodes"]]
        for each in found["violations"]
    }
