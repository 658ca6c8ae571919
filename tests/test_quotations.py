"""Every verdict is about sentences of the papers: they are quoted word for word, with their places."""

from pathlib import Path

import pytest

from partita.reproduction.experiment import Experiment, Quotation
from partita.reproduction.registry import EXPERIMENTS

PAPERS = Path(__file__).parents[2] / "shared" / "papers"
IDS = ("2504.19901", "2504.15956")


def squeezed(text: str) -> str:
    """Without spaces and line breaks."""
    return "".join(text.split())


def texts_of(paper: str, *, summary: bool) -> list[str]:
    """The stored texts that are the paper, or its summaries. The full text opens with the title."""
    titles = {
        "2504.19901": "Attention Mechanism, Max-Affine Partition, and Universal Approximation",
        "2504.15956": "Universal Approximation with Softmax Attention",
    }
    found = []
    for place in sorted(PAPERS.glob("*.txt")):
        text = place.read_text(encoding="utf-8")
        is_full = text.lstrip().startswith(titles[paper])
        is_summary = f"arxiv_id: '{paper}'" in text or (f"eprint = {{{paper}}}" in text and not is_full)
        if is_summary if summary else is_full:
            found.append(squeezed(text))
    return found


def is_quoted(quotation: Quotation, paper: str) -> bool:
    return any(squeezed(quotation.text) in text for text in texts_of(paper, summary=quotation.of_summary))


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=lambda e: e.name)
def test_every_verdict_quotes_its_claim_with_its_place(experiment: Experiment) -> None:
    assert experiment.quotations
    for quotation in experiment.quotations:
        assert len(quotation.text) > 20 and quotation.place
    assert sum(paper in experiment.source for paper in IDS) == 1


@pytest.mark.skipif(not PAPERS.is_dir(), reason="the papers are not beside the repository")
@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=lambda e: e.name)
def test_the_quotations_stand_in_the_paper(experiment: Experiment) -> None:
    paper = next(p for p in IDS if p in experiment.source)
    for quotation in experiment.quotations:
        assert is_quoted(quotation, paper), quotation


@pytest.mark.skipif(not PAPERS.is_dir(), reason="the papers are not beside the repository")
def test_a_sentence_that_the_paper_does_not_contain_is_not_a_quotation() -> None:
    true = Quotation(
        "Our key insight is to interpret single-head attention as an input domain-partition mechanism", "abstract"
    )
    assert is_quoted(true, "2504.19901")
    assert not is_quoted(Quotation(true.text.replace("single-head", "multi-head"), "abstract"), "2504.19901")
    assert not is_quoted(true, "2504.15956")
