"""A hook of mkdocs (mkdocs.yml): the site shows the files of the repository as they are.

Links work in the site as they do on a code host: a linked file of the repository becomes a page
that shows it, or the place of the reference that documents the module. The reference pages are
those that ``extra.reference`` of mkdocs.yml lists: the title of a page, then what mkdocstrings
documents there.
"""

import json
import posixpath
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit
from xml.etree.ElementTree import Element

from markdown import Extension, Markdown
from markdown.treeprocessors import Treeprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
"""Documents outside docs/. mkdocs takes README.md as the first page of the site."""


def page_of(path: str, reference: dict[str, list[str]]) -> str:
    """Return the place in the site, as "page.md" or "page.md#anchor", of a file or folder of the
    repository."""
    name = "coppice." + path.removesuffix(".py").replace("/", ".")
    for page, names in reference.items():
        if name in names:
            return f"reference/{page}.md#{name}"
    if path in OUTSIDE:
        return path
    if path.startswith("docs/"):
        return path.removeprefix("docs/") + (".md" if path.endswith(".ipynb") else "")
    return f"source/{path}.md"


def target(link: str, document: str) -> str:
    """Return the path in the repository that a link of ``document`` means; "" if it points into the
    document itself or at another site."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc or not parts.path:
        return ""
    return posixpath.normpath(posixpath.join(posixpath.dirname(document), unquote(parts.path)))


def rewritten(link: str, document: str, reference: dict[str, list[str]]) -> str:
    """Return the link between pages of the site that says what ``link`` says between files of the
    repository."""
    path = target(link, document)
    if not path:
        return link
    page, _, anchor = page_of(path, reference).partition("#")
    place = posixpath.relpath(page, posixpath.dirname(page_of(document, reference)) or ".")
    return urlunsplit(("", "", place, "", urlsplit(link).fragment or anchor))


def source_page(path: Path) -> str:
    """Return the page of a source file, or of a folder, which names its files. The search leaves it
    out."""
    head = f"---\nsearch:\n  exclude: true\n---\n\n# {path.relative_to(ROOT)}\n\n"
    if path.is_file():
        text = path.read_text()
    else:
        text = "\n".join(sorted(one.name for one in path.iterdir() if one.name != "__pycache__"))
    return f"{head}~~~~~~~~ {path.suffix.removeprefix('.')}\n{text}\n~~~~~~~~\n"


def notebook_page(path: Path) -> str:
    """Return the cells of a notebook."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join(parts)


def reference_page(page: str, names: list[str]) -> str:
    """Return the page whose contents mkdocstrings makes from the docstrings of ``names``."""
    return f"# {page.capitalize()}\n" + "".join(
        f"\n::: {name}\n    options:\n      toc_label: {name}\n" for name in names
    )


class Links(Treeprocessor, Extension):
    """Rewrite the links and pictures of a page, before mkdocs checks them. document: the path in
    the repository of the page's text."""

    document = ""

    def __init__(self, reference: dict[str, list[str]]):
        Extension.__init__(self)
        self.reference = reference

    def extendMarkdown(self, md: Markdown) -> None:
        # after links are read (20), before mkdocs resolves them (0)
        md.treeprocessors.register(self, "repository", 1)

    def run(self, root: Element) -> None:
        for element in root.iter() if self.document else ():
            for name in ("href", "src"):
                if link := element.get(name):
                    element.set(name, rewritten(link, self.document, self.reference))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.extra["links"] = Links(config.extra["reference"])
    config.markdown_extensions.append(config.extra["links"])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    reference = config.extra["reference"]

    def add(place: str, **how: Any) -> None:
        files.append(File.generated(config, place, **how))

    for path in OUTSIDE:
        add(path, abs_src_path=str(ROOT / path))
    for page, names in reference.items():
        add(f"reference/{page}.md", content=reference_page(page, names))
    for path in (ROOT / "docs").rglob("*.ipynb"):
        place = page_of(str(path.relative_to(ROOT)), reference)
        add(place, content=notebook_page(path))
    for path in linked():
        place = page_of(path, reference)
        if place.startswith("source/") and (ROOT / path).exists():
            add(place, content=source_page(ROOT / path), inclusion=InclusionLevel.NOT_IN_NAV)
    return files


def linked() -> set[str]:
    """Return the paths of everything in the repository that a document links to."""
    documents = [*OUTSIDE, *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
    paths = set[str]()
    for name in documents:
        links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / name).read_text())
        paths |= {target(link, name) for link in links}
    return {path for path in paths if path and not path.startswith("..")}


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    path = page.file.src_uri
    document = path if path in OUTSIDE else f"docs/{path}"
    generated = path.startswith(("reference/", "source/"))
    config.extra["links"].document = "" if generated else document


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keep the search from finding the source code that stands folded below each docstring."""
    source = 'class="mkdocstrings-source"'
    return html.replace(f"<details {source}", f"<details data-search-exclude {source}")
