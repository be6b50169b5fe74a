"""The documentation as a site: links between files of the repository become links between pages,
and mkdocs refuses what is broken."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from markdown import Markdown
from mkdocs.config import load_config
from playwright.sync_api import sync_playwright

from docs.site.pages import OUTSIDE, ROOT, Links, notebook_page, rewritten

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
REFERENCE = {"learner": ["coppice.learner.update.table", "coppice.learner.schemes"]}


@pytest.mark.parametrize(
    ("link", "document", "expected"),
    [
        ("docs/gpu.md#memory", "README.md", "gpu.md#memory"),
        ("NOTICE", "README.md", "source/NOTICE.md"),
        ("watch.md#keys", "docs/dump.md", "watch.md#keys"),
        ("notebook.ipynb", "docs/notebook.md", "notebook.ipynb.md"),
        ("../README.md#the-house", "docs/status.md", "README.md#the-house"),
        ("../learner/schemes", "docs/extend.md", "reference/learner.md#coppice.learner.schemes"),
        ("../../configs/a.toml", "docs/replication/b.md", "../source/configs/a.toml.md"),
        ("../figures/a.svg", "docs/replication/slate.md", "../figures/a.svg"),
        ("#the-house", "README.md", "#the-house"),
        ("https://arxiv.org/abs/2509.21240", "README.md", "https://arxiv.org/abs/2509.21240"),
    ],
)
def test_a_link_leads_to_the_page_of_the_file_it_names(
    link: str, document: str, expected: str
) -> None:
    assert rewritten(link, document, REFERENCE) == expected


def test_links_and_pictures_are_rewritten_and_code_is_not() -> None:
    links = Links(REFERENCE)
    links.document = "README.md"
    text = "[a](docs/gpu.md) ![b](docs/figures/c.svg) `[a](docs/gpu.md)`\n\n"
    text += "    [a](docs/gpu.md)\n\n[d][e]\n\n[e]: docs/dump.md\n"
    html = Markdown(extensions=[links]).convert(text)
    assert 'href="gpu.md"' in html
    assert 'src="figures/c.svg"' in html
    assert 'href="dump.md"' in html
    assert html.count("[a](docs/gpu.md)") == 2


def misread(html: str) -> str:
    """Return the first item of a list that became part of a paragraph, as happens here but not on
    code hosts; "" if there is none."""
    lost = re.search(r"<p>(?:(?!</p>).)*?^([-*] [^<\n]*)", html, re.DOTALL | re.MULTILINE)
    return lost[1] if lost else ""


@pytest.mark.second
def test_every_list_of_the_documents_has_an_empty_line_before_it() -> None:
    config = load_config(str(ROOT / "mkdocs.yml"))
    site = Markdown(extensions=config.markdown_extensions, extension_configs=config.mdx_configs)
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")]
    for path in (*(ROOT / name for name in OUTSIDE), *pages):
        text = notebook_page(path) if path.suffix == ".ipynb" else path.read_text()
        assert misread(site.reset().convert(text)) == "", path


def test_a_list_that_the_site_would_show_as_text_is_found() -> None:
    for text, lost in (
        ("Text:\n- item", "- item"),
        ("Text:\n\n- item\n- item", ""),
        ("```\n- code\n```\n\nText - with a dash.", ""),
    ):
        assert misread(Markdown(extensions=["pymdownx.superfences"]).convert(text)) == lost


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of the site's parts, with two pages and a reference of one module."""
    folder = tmp_path_factory.mktemp("repository")
    shutil.copytree(ROOT / "docs" / "site", folder / "docs" / "site")
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        (folder / name).write_text("# Text\n")
    (folder / "src" / "coppice").mkdir(parents=True)
    for name in ("adding.py", "src/coppice/__init__.py", "src/coppice/adding.py"):
        (folder / name).write_text('"""Adds."""\n')
    (folder / "docs" / "page.md").write_text(
        "# Page\n\n## A part\n\n[code](../adding.py), [home](../README.md)\n"
    )
    config = (ROOT / "mkdocs.yml").read_text()
    start, end = config.index("\nnav:"), config.index("\ntheme:")
    nav = "\nnav: [README.md, page.md, CONTRIBUTING.md, CHANGELOG.md, reference/code.md]\n"
    config = config[:start] + nav + config[end:]
    start, end = config.index("  reference:"), config.index("\nplugins:")
    (folder / "mkdocs.yml").write_text(
        config[:start] + "  reference: {code: [coppice.adding]}\n" + config[end:]
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("link", "warning"),
    [
        ("docs/page.md#a-part", ""),
        ("docs/page.md#no-part", "no-part"),
        ("no_such_file.py", "no_such_file.py"),
        ("docs/forgotten.md", "not included in the \"nav\""),
    ],
)  # fmt: skip
def test_the_strict_build_refuses_a_broken_link_and_a_page_that_the_nav_forgets(
    copy: Path, link: str, warning: str
) -> None:
    (copy / "docs" / "forgotten.md").unlink(missing_ok=True)
    if "forgotten" in link:
        (copy / link).write_text("# Forgotten\n")
    result = built(copy, f"# Home\n\n[link]({link})\n")
    assert (result.returncode != 0) == bool(warning), result.stderr
    assert warning in result.stderr
    if not warning:
        site = copy / ".cache" / "site"
        assert 'href="page.html#a-part"' in (site / "index.html").read_text()
        assert 'href="reference/code.html#coppice.adding"' in (site / "page.html").read_text()


def built(copy: Path, home: str) -> subprocess.CompletedProcess[str]:
    (copy / "README.md").write_text(home)
    build = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        build, cwd=copy, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on PATH (Debian: apt-get install chromium)"
)
def test_the_search_works_from_files_and_nothing_comes_from_a_network(copy: Path) -> None:
    (copy / "docs" / "forgotten.md").unlink(missing_ok=True)
    assert built(copy, "# Home\n\nSome quokkas live here.\n").returncode == 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page()
        requests = list[str]()
        page.on("request", lambda request: requests.append(request.url))
        page.goto((copy / ".cache" / "site" / "page.html").as_uri())
        page.click(".md-search__input")
        page.keyboard.type("quokkas")
        page.wait_for_selector(".md-search-result__item a[href*='index.html']")
        browser.close()
    assert len(requests) > 3
    assert [url for url in requests if not url.startswith(("file:", "data:", "about:"))] == []
