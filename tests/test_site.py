"""The site in a browser: each page opens without an error and fits a phone; search works.

``make docs`` runs it. It needs the site in ``build/site``, and Chromium.
"""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import launch

SITE = Path(__file__).resolve().parent.parent / "build" / "site"
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
PHONE, DESK = ({"width": width, "height": 844} for width in (390, 1280))
# The first words of each table that is wider than the text.
CUT_TABLES = """() => [...document.querySelectorAll("article table")]
    .filter(table => table.getBoundingClientRect().right
        > table.closest("article").getBoundingClientRect().right + 1)
    .map(table => table.innerText.slice(0, 40))"""
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

pytestmark = [launch.NOT_ON_RANKS, pytest.mark.launches]


@pytest.fixture(scope="module")
def browser() -> Iterator:
    sync_api = pytest.importorskip("playwright.sync_api")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    if not PAGES:
        pytest.skip("the site is not built: make docs")
    # Chromium requires it for root.
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=root)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Handler, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def listen(page, errors: list[str]) -> None:
    page.on("pageerror", lambda error: errors.append(f"{page.url}: {error}"))
    page.on(
        "console",
        lambda said: said.type == "error" and errors.append(f"{page.url}: {said.text}"),
    )


def test_pages_open_and_fit(browser, served):
    errors: list[str] = []
    page = browser.new_page()
    listen(page, errors)
    for name in PAGES:
        page.goto(f"{served}/{name}")
        # The theme moves its search field after a change of the window's size.
        page.add_style_tag(content="* { transition: none !important }")
        for size in (PHONE, DESK):
            page.set_viewport_size(size)
            wide = page.evaluate("document.documentElement.scrollWidth")
            if wide > size["width"]:
                errors.append(f"{name}: {wide} pixels wide on {size['width']}")
            cut = page.evaluate(CUT_TABLES)
            errors += [f"{name}: on {size['width']} cut at the right: {t}" for t in cut]
    page.close()
    assert PAGES and not errors


@pytest.mark.parametrize("by", ["http", "file"])
@pytest.mark.parametrize(
    ("words", "title"),
    [
        ("BackupAndRestore", "From model.fit"),
        ("min_np", "Elastic jobs"),
        ("tf.distribute", "From tf.distribute"),
        ("colab", "Notebooks"),
        ("jupyter", "Notebooks"),
        ("mixed precision", "Mixed precision"),
        ("gradient accumulation", "Save memory"),
        ("fsdp", "Save memory"),
        ("profile", "Troubleshooting"),
        ("early stopping", "Callbacks"),
        ("learning rate", "Callbacks"),
    ],
)
def test_search_finds(browser, served, by, words, title):
    errors: list[str] = []
    page = browser.new_page(viewport=DESK)
    listen(page, errors)
    page.goto(
        f"{served}/index.html" if by == "http" else (SITE / "index.html").as_uri()
    )
    page.locator(".md-search__input").press_sequentially(words)
    found = page.locator(".md-search-result__item h1", has_text=title)
    found.first.wait_for()
    assert not errors
    page.close()
