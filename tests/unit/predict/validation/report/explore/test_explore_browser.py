"""The page in a real browser: charts, sliders, light and dark, narrow and wide, the keyboard alone."""

from __future__ import annotations

from typing import Any

import pytest
from browser import MARKS, NARROW, NEEDS_AXE, NEEDS_BROWSER, OVERFLOW, WIDE, seen_in, violations

pytest.importorskip("uvicorn")

from explored_page import TOKEN, Served

pytestmark = NEEDS_BROWSER
CHARTS = ("ranking", "breakdown", "memory", "timeline")


def answered(browser: Any) -> None:
    """Wait until the page has nothing more to ask."""
    from selenium.webdriver.support.ui import WebDriverWait

    done = (
        "return !document.getElementById('answers').hasAttribute('aria-busy')"
        " && (document.getElementById('error').textContent"
        " || /ms.$/.test(document.getElementById('status').textContent))"
    )
    WebDriverWait(browser, 60, 0.05).until(lambda driver: driver.execute_script(done))


def opened(browser: Any, served: Served, query: str = "", *, width: int = WIDE, scheme: str = "light") -> None:
    seen_in(browser, width, scheme)
    browser.get_log("browser")
    browser.get(f"http://127.0.0.1:{served.port}/{TOKEN}/{query}")
    answered(browser)


def text(browser: Any, selector: str) -> str:
    found: str = browser.find_element("css selector", selector).text
    return found


def moved(browser: Any, slider: str, value: float) -> None:
    script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))"
    browser.execute_script(script, browser.find_element("id", slider), value)
    answered(browser)


@pytest.mark.parametrize(("width", "scheme"), [(WIDE, "light"), (NARROW, "dark")])
def test_every_chart_is_drawn(browser: Any, served: Served, width: int, scheme: str) -> None:
    opened(browser, served, width=width, scheme=scheme)
    for name in CHARTS:
        assert browser.execute_script(MARKS, browser.find_element("id", f"chart-{name}")) >= 1, name
    assert browser.get_log("browser") == []
    assert browser.execute_script(OVERFLOW) <= 0
    assert not browser.find_elements("css selector", "img")
    assert "<img src=x" in text(browser, "#profile")


def test_numbers_follow_a_slider_and_a_link_holds_them(browser: Any, served: Served) -> None:
    opened(browser, served)
    before = text(browser, "#rows tbody")
    moved(browser, "peak_flops", 0.5)
    after = text(browser, "#rows tbody")
    assert after != before
    assert "--vary peak-flops=3.16" in text(browser, "#command")
    address = browser.current_url
    browser.get("about:blank")
    browser.get(address)
    answered(browser)
    assert text(browser, "#rows tbody") == after
    browser.find_element("id", "reset").click()
    answered(browser)
    assert text(browser, "#rows tbody") == before


def test_the_button_searches_all_candidates_again(browser: Any, served: Served) -> None:
    opened(browser, served)
    moved(browser, "memory_bandwidth", -0.55)
    assert "looked at again" in text(browser, "#searched")
    browser.find_element("css selector", "#controls button").click()
    answered(browser)
    assert "looked at again" not in text(browser, "#searched")
    assert "candidates" in text(browser, "#searched")


def test_a_held_slider_says_what_is_to_come(browser: Any, served: Served) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    opened(browser, served)
    before, slider = text(browser, "#rows tbody"), browser.find_element("id", "bandwidth")
    point = "arguments[0].dispatchEvent(new PointerEvent(arguments[1], {bubbles: true}))"
    browser.execute_script(point, slider, "pointerdown")
    browser.execute_script("arguments[0].value = -1; arguments[0].dispatchEvent(new Event('input'))", slider)
    WebDriverWait(browser, 60, 0.05).until(lambda _: "Others, which may be faster" in text(browser, "#status"))
    assert text(browser, "#rows tbody") != before
    assert "still to come" in text(browser, "#status[role=status]")
    browser.execute_script(point, slider, "pointerup")
    answered(browser)
    assert "still to come" not in text(browser, "main")
    assert "found_on" not in browser.current_url


def test_a_slider_that_moves_on_is_answered_last(browser: Any, served: Served) -> None:
    opened(browser, served)
    script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'))"
    for step in range(-10, 0):
        browser.execute_script(script, browser.find_element("id", "latency"), step / 10)
    answered(browser)
    assert text(browser, "#error") == ""
    assert "--vary latency=0.794" in text(browser, "#command")


def test_four_configurations_stand_side_by_side(browser: Any, served: Served) -> None:
    opened(browser, served)
    for value in (0, 0.5, 1, -0.5):
        moved(browser, "memory_bandwidth", value)
        browser.find_element("id", "pin").click()
        answered(browser)
    assert not browser.find_element("id", "pin").is_enabled()
    assert len(browser.find_elements("css selector", "#pins tr:first-child td")) == 4
    assert len(set(text(browser, "#pins tr:nth-child(6)").split(" ms"))) >= 3
    browser.find_element("css selector", "#pins button").click()
    answered(browser)
    assert len(browser.find_elements("css selector", "#pins tr:first-child td")) == 3


def test_keys_alone_choose_and_slide(browser: Any, served: Served) -> None:
    from selenium.webdriver.common.keys import Keys

    opened(browser, served)
    first = text(browser, "#chosen")
    browser.find_element("css selector", "input[name=row]:checked").send_keys(Keys.ARROW_DOWN)
    answered(browser)
    assert text(browser, "#chosen") != first
    assert browser.execute_script("return document.activeElement.name") == "row"
    browser.find_element("id", "latency").send_keys(Keys.ARROW_RIGHT)
    answered(browser)
    assert "latency=1.12" in text(browser, "#command")


def test_a_mistake_is_told_and_mended(browser: Any, served: Served) -> None:
    from selenium.webdriver.common.keys import Keys

    opened(browser, served)
    memory = browser.find_element("id", "memory")
    memory.send_keys("much", Keys.ENTER)
    answered(browser)
    assert "--memory" in text(browser, "#error")
    memory.clear()
    memory.send_keys("64GiB", Keys.ENTER)
    answered(browser)
    assert text(browser, "#error") == ""
    assert "yes" in text(browser, "#rows tbody")


def test_no_rows_stand_beside_a_search_that_failed(browser: Any, served: Served) -> None:
    from selenium.webdriver.common.keys import Keys

    opened(browser, served)
    browser.find_element("id", "ranks").clear()
    browser.find_element("id", "ranks").send_keys("0", Keys.ENTER)
    answered(browser)
    for slid in (0, 0.5):
        moved(browser, "latency", slid)
        assert text(browser, "#error") == "ranks: give a whole number from 1 to 1,048,576"
        assert not browser.find_element("id", "answers").is_displayed()
        assert text(browser, "#status") == ""


@pytest.mark.parametrize("query", ["?row=-3", "?row=1.5", "?row=x", "?profile=9&model=x&dtype=x&device=x&latency=x"])
def test_a_link_with_wrong_values_shows_an_answer(browser: Any, served: Served, query: str) -> None:
    opened(browser, served, query)
    assert text(browser, "#error") == ""
    assert len(browser.find_elements("css selector", "input[name=row]:checked")) == 1


def test_a_wrong_comparison_of_a_link_can_be_left_out(browser: Any, served: Served) -> None:
    from selenium.webdriver.common.keys import Keys

    opened(browser, served, "?pins=[1,{}]")
    assert "bad request" in text(browser, "#pins")
    for _ in range(2):
        browser.find_element("css selector", "#pins button").click()
        answered(browser)
    assert text(browser, "#pins") == ""
    browser.find_element("id", "pin").send_keys(Keys.ENTER)
    answered(browser)
    assert "as measured" in text(browser, "#pins")


@NEEDS_AXE
@pytest.mark.parametrize(("width", "scheme"), [(WIDE, "light"), (WIDE, "dark"), (NARROW, "light")])
def test_axe_finds_no_barrier(browser: Any, served: Served, width: int, scheme: str) -> None:
    opened(browser, served, width=width, scheme=scheme)
    browser.find_element("id", "pin").click()
    answered(browser)
    assert violations(browser) == {}
