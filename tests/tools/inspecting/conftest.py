"""A browser for the pages."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import sync_playwright

FLAGS = "no-sandbox disable-gpu no-first-run disable-background-networking disable-sync".split()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, or none."""
    programs = ("chromium", "chromium-browser", "google-chrome")
    if (program := next(filter(None, map(shutil.which, programs)), None)) is None:
        pytest.skip("no Chromium on PATH (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        flags = [f"--{flag}" for flag in (*FLAGS, "disable-component-update")]
        chromium = playwright.chromium.launch(executable_path=program, args=flags)
        yield chromium
        chromium.close()
