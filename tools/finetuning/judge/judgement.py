"""The two lines a PPRM learns to write, "Analysis: .." and "Scores: <final_score>S,M</final_score>"
(methods.md 2.2)."""

import re

from coppice.judges.pprm import parse_final_score

_SCORES = re.compile(r"(?:Scores:)?\s*<final_score>.*", re.DOTALL)


def two_lines(text: str, pair: tuple[int, int] | None = None) -> str:
    """Return a judgement in exactly two lines, with ``pair`` as its score if given; "" if it holds
    no analysis or no readable score."""
    score = pair or parse_final_score(text)
    analysis = " ".join(_SCORES.sub("", text).replace("Analysis:", "", 1).split())
    if score is None or not analysis:
        return ""
    return f"Analysis: {analysis}\nScores: <final_score>{score[0]},{score[1]}</final_score>"


def parse_correction(text: str) -> tuple[int, int] | None:
    """Return S and M of a text "S,M", or None for any other text."""
    return parse_final_score(f"<final_score>{text}</final_score>") if "<" not in text else None
