"""The nouns of product names, which decide whether two products are of one type. Found by spaCy,
which is an optional dependency."""

from collections.abc import Sequence

NOUNS = ("NOUN", "PROPN")


def spacy_nouns(names: Sequence[str], pipeline: str) -> list[tuple[str, ...]]:
    """Return the lower-case nouns of each name. pipeline: the name or the folder of a spaCy
    pipeline that tags parts of speech.

    Raises ValueError with the remedy if spaCy or the pipeline is not installed.
    """
    try:
        import spacy  # pyright: ignore[reportMissingImports] (an extra)
    except ImportError:
        raise ValueError(_remedy("spaCy is not installed")) from None
    try:
        parser = spacy.load(pipeline, exclude=["parser", "ner"])
    except OSError:
        raise ValueError(_remedy(f"spaCy has no pipeline {pipeline!r}")) from None
    return [
        tuple(token.text.lower() for token in document if token.pos_ in NOUNS)
        for document in parser.pipe(list(names))
    ]


def _remedy(missing: str) -> str:
    return (
        f"{missing}, and it finds the nouns of product names: install the extra `webshop` and the pipeline"
        " (python -m spacy download en_core_web_sm), or give each product of the file a list `nouns`"
    )
