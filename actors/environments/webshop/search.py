"""Search by BM25 over the products' texts, with the settings of WebShop's Lucene index."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import bm25s
import numpy as np
import Stemmer

from coppice.actors.environments.webshop.products import Product

MOST_RESULTS = 50
K1, B = 0.9, 0.4
REMEMBERED = 10_000
"""How many queries keep their results: every page that a query leads to asks for them again."""


class Search:
    """An index of products. The order of equal scores is that of the products, so results are the
    same in every process."""

    def __init__(self, products: Sequence[Product]):
        self.asins = [product.asin for product in products]
        self._stemmer = Stemmer.Stemmer("porter")
        self._index = bm25s.BM25(method="lucene", k1=K1, b=B)
        self._index.index(
            self._tokens([_text(product) for product in products]), show_progress=False
        )
        self.results = lru_cache(REMEMBERED)(self._results)

    def _results(self, query: str) -> tuple[str, ...]:
        """Return the asins of at most 50 products that share a word with the query, best first."""
        (words,) = self._tokens([query])
        if not words:
            return ()
        scores = self._index.get_scores(words)
        best = np.lexsort((np.arange(len(scores)), -scores))[:MOST_RESULTS]
        return tuple(self.asins[place] for place in best if scores[place] > 0)

    def _tokens(self, texts: list[str]) -> Any:
        return bm25s.tokenize(
            [text.lower().replace("'s", "") for text in texts],
            token_pattern=r"(?u)\b\w+\b",
            stopwords="english",
            stemmer=self._stemmer,
            return_ids=False,
            show_progress=False,
        )


def _text(product: Product) -> str:
    options = ", and ".join(
        f"{name}: {', '.join(values)}" for name, values in product.options.items()
    )
    return " ".join([product.name, product.description, *product.bullets[:1], options])
