"""The page in a real browser: on a phone and on a wide screen, in light and in dark."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Error

from tests.inductor_passes.inspection.conftest import ROOT

SCREENSHOTS = ROOT / "build" / "inspection"
SIZES = {360: 740, 1280: 800}

# Contrast of a text with what is behind it, as the Web Content Accessibility Guidelines define it.
CONTRASTS = """() => {
  const channels = (color) => (color.match(/[\\d.]+/g) || []).map(Number);
  const luminance = (color) => {
    const linear = (c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = channels(color).map((c) => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const rect = element.closest("g.node")?.querySelector("rect");
    if (rect && !element.classList.contains("more")) return getComputedStyle(rect).fill;
    for (let e = element; e; e = e.parentElement) {
      const color = getComputedStyle(e).backgroundColor, alpha = channels(color)[3];
      if (alpha === undefined || alpha > 0) return color;
    }
  };
  const texts = [...document.querySelectorAll("body *")].filter((e) => e.getClientRects().length &&
    !["SCRIPT", "STYLE", "title", "TITLE"].includes(e.tagName) &&
    [...e.childNodes].some((n) => n.nodeType === Node.TEXT_NODE && n.textContent.trim()));
  return texts.map((e) => {
    const style = getComputedStyle(e), color = e instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [luminance(color), luminance(behind(e))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), e.textContent.trim().slice(0, 40)];
  });
}"""

# How much of each highlighted node lies inside the box that it can be scrolled in.
VISIBLE = """() => [...document.querySelectorAll(".canvas")].map((canvas) => {
  const box = canvas.getBoundingClientRect();
  const marked = [...canvas.querySelectorAll(".node.snapshot, .node.state-passing, .node.added, .node.blamed")];
  return Math.max(...marked.map((node) => {
    const r = node.querySelector("rect").getBoundingClientRect();
    const across = Math.min(r.right, box.right) - Math.max(r.left, box.left);
    const down = Math.min(r.bottom, box.bottom) - Math.max(r.top, box.top);
    return Math.max(across, 0) * Math.max(down, 0) / (r.width * r.height);
  }));
})"""


@pytest.fixture(params=["light", "dark"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=SIZES)
def width(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def keep_screenshot(page: Any, file: Path) -> None:
    """For a person to look at. On a busy machine Chromium may give up on a long page, one time in a hundred."""
    file.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(3):
        with contextlib.suppress(Error):
            page.screenshot(path=file, full_page=True)
            return
    pytest.fail(f"Chromium takes no screenshot for {file}")


@pytest.fixture(params=["granite", "program"])
def page(request: pytest.FixtureRequest, chromium: Any, width: int, scheme: str) -> Iterator[Any]:
    """An opened page; fails afterwards if the browser complained or asked for anything but the file."""
    folder: Path = request.getfixturevalue(request.param)
    page = chromium.new_page(viewport={"width": width, "height": SIZES[width]}, color_scheme=scheme)
    complaints: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto((folder / "report.html").as_uri())
    keep_screenshot(page, SCREENSHOTS / f"{request.param}_{width}_{scheme}.png")
    yield page
    page.close()
    assert not complaints
    assert requests == [(folder / "report.html").as_uri()]


def test_page(page: Any, width: int, scheme: str) -> None:
    # The page itself does not scroll sideways; what is wider has a box of its own.
    assert page.evaluate("document.documentElement.scrollWidth") == width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, background[4:-1].split(","))) < 128) == (scheme == "dark")

    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 100
    too_faint = [(round(ratio, 2), text) for ratio, text in contrasts if not ratio >= 4.5]
    assert not too_faint

    visible = page.evaluate(VISIBLE)
    assert len(visible) >= 2
    assert min(visible) > 0.5

    # A chosen node says where it comes from.
    node = page.locator(".node.snapshot").first
    node.focus()
    node.press("Enter")
    details = page.locator(".details").first
    assert details.is_visible()
    assert f"{node.get_attribute('data-name')} = aten.index" in details.inner_text()
    assert ".py:" in details.inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") == width
