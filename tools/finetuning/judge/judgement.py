"""The two lines a PPRM learns to write, "Analysis: .." and "Scores: <final_score>S,M</final_score>" (methods.md 2.2)."""

import re

from judges.pprm import parse_final_score

_SCORES = re.compile(r"(?:Scores:)?\s*<final_score>.*", re.DOTALL)


def two_lines(text: str, pair: tuple[int, int] | None = None) -> str:
    """A judgement in exactly two lines, its score replaced by ``pair`` where there is one; "" when it holds no score that can be read."""
    found = pair or parse_final_score(text)
    analysis = " ".join(_SCORES.sub("", text).replace("Analysis:", "", 1).split())
    if found is None or not analysis:
        return ""
    return f"Analysis: {analysis}\nScores: <final_score>{found[0]},{found[1]}</final_score>"


def parse_correction(text: str) -> tuple[int, int] | None:
    """S and M of "S,M"; None for anything else."""
    return parse_final_score(f"<final_score>{text}</final_score>") if "<" not in text else None
