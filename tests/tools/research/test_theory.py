"""The claims of four papers: every row of coppice dev theory agrees, and expects what the paper quotes or a person can
work out."""

import pytest

from coppice.research.theories import ClaimRow, main, oprl, ppr, slate, vpr

PAPERS = {"slate": slate, "ppr": ppr, "vpr": vpr, "oprl": oprl}
QUOTED = {
    # 1 / T; 1 / 3.25, 1 / 13.5, 1 / 71; the inequality of proposition 2; 7.2 x .8994 and 4.4
    "slate": [
        "0.5000 / 0.2500 / 0.1250", "0.3077 / 0.0741 / 0.0141", "0.8421 / 0.8889 / 0.9184",
        "6.4759 / 4.4000",
    ],
    "ppr": ["1.2143", "0.3676", "0.0488", "3.0 / 5.0", "-0.4 / -0.8"],
    "vpr": ["0.900000 / 0.348678", "9.000000 / 0.000266", "9.49"],
    "oprl": ["-6.21 / 0.69"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("paper", PAPERS)
def test_every_row_agrees_with_other_draws_too_and_expects_what_is_quoted(paper: str) -> None:
    rows = PAPERS[paper].rows(seed=1)
    assert [row.claim for row in rows if not row.agrees] == []
    assert set(QUOTED[paper]) <= {row.expected for row in rows}


def test_the_command_prints_a_table_and_returns_1_when_a_row_disagrees(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["vpr"]) == 0
    assert "VPR Prop 3" in capsys.readouterr().out
    monkeypatch.setattr(vpr, "rows", lambda seed: [ClaimRow("a claim", "1", "2", False)])
    assert main(["vpr"]) == 1
    assert "NO" in capsys.readouterr().out
    assert main(["nobody"]) == 2
