"""The Bradley-Terry judge: the sigmoid of the classifier's own logit, the end of a long text, and
folders that are no reward model."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForSequenceClassification,
)

from coppice.judges.reward_model import RewardModel, sigmoid
from coppice.judges.serve import make_worker
from coppice.wire.messages import JudgedTurn
from tests import tiny


def turn(question: str = "Who?", response: str = "<think> a </think>", **fields: Any) -> JudgedTurn:
    return JudgedTurn(question, ["gold"], "", response, 1, 4, **fields)


FOUND = "\n<information>found</information>\n"
BEFORE = "<think> b </think> <search> c </search>"
LONG = turn("What is much longer than the others?", "<answer> this </answer>")
TEXT = "<|user|>Who?<|assistant|><think> a </think>"
TURNS = [turn(), turn(transcript=BEFORE, observation=FOUND), LONG]


def save(folder: Path, labels: int = 1, **shape: Any) -> Path:
    tiny.save(folder)
    torch.manual_seed(7)
    config = tiny.config("llama", num_labels=labels, **shape)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("reward"))


def expected(folder: Path, text: str) -> Any:
    """The sigmoid of the logit that the library gives, one text at a time."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]
    with torch.inference_mode():
        logit = model(input_ids=torch.tensor([ids])).logits.item()
    return pytest.approx(1 / (1 + math.exp(-logit)), abs=1e-6)


async def started(folder: Path, **options: Any) -> RewardModel:
    judge = make_worker("reward_model", {"model": str(folder)} | options)
    assert isinstance(judge, RewardModel)
    await judge.start()
    return judge


async def test_scores_are_the_sigmoid_of_the_logit_also_in_a_batch(classifier: Path) -> None:
    judge = await started(classifier)
    made = await judge.score(TURNS)
    texts = [
        TEXT,
        f"<|user|>Who?\n\n{BEFORE}<|assistant|><think> a </think>{FOUND}",
        "<|user|>What is much longer than the others?<|assistant|><answer> this </answer>",
    ]
    scores = [judgement.scores["process"] for judgement in made]
    assert scores == [expected(classifier, text) for text in texts]
    assert len({round(score, 4) for score in scores}) == 3
    await judge.close()


async def test_of_a_long_text_the_end_is_read(classifier: Path) -> None:
    judge = await started(classifier, max_length=20)
    (made,) = await judge.score([turn()])
    kept = judge.end(judge.tokens(turn()))
    assert AutoTokenizer.from_pretrained(classifier).decode(kept) == TEXT[-20:]
    assert made.scores["process"] == expected(classifier, TEXT[-20:])
    whole = await started(classifier, max_length=len(TEXT))
    assert await whole.score([turn()]) != [made]


async def test_a_cut_text_keeps_its_opening_token(classifier: Path, tmp_path: Path) -> None:
    folder = save(tmp_path / "opened")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{{ bos_token }}" + tiny.TEMPLATE
    tokenizer.save_pretrained(folder)
    judge = await started(folder, max_length=20)
    ids = judge.end(judge.tokens(turn()))
    assert len(ids) == 20
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == TEXT[-19:]


async def test_without_a_padding_token_scores_are_the_same(
    classifier: Path, tmp_path: Path
) -> None:
    bare = await started(save(tmp_path / "bare", pad_token_id=None))
    made, alone = await bare.score(TURNS), [(await bare.score([one]))[0] for one in TURNS]
    assert made == alone
    padded = await (await started(classifier)).score(TURNS)
    scores = [[j.scores["process"] for j in judgements] for judgements in (made, padded)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)


async def test_what_is_no_reward_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gives 2 logits, expected 1"):
        await started(save(tmp_path / "two", labels=2))
    with pytest.raises(ValueError, match=r"lacks the weights \['score.weight'\]"):
        await started(tiny.save(tmp_path / "policy", num_labels=1))
    with pytest.raises(ValueError, match="reads 64 tokens at most: lower max_length = 4096"):
        await started(save(tmp_path / "short", max_position_embeddings=64))
    for missing in (tmp_path / "nope", Path("/nope")):
        with pytest.raises(ValueError, match=rf"model '{missing}' cannot be loaded: expected a"):
            await started(missing)
    with pytest.raises(ValueError, match="max_length = 1"):
        make_worker("reward_model", {"model": "m", "max_length": 1})


async def test_weights_that_are_not_safetensors_are_not_read(tmp_path: Path) -> None:
    folder = save(tmp_path / "renamed")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        await started(folder)


def test_the_sigmoid_is_right_far_from_zero() -> None:
    assert [sigmoid(logit) for logit in (-1e6, 0.0, 1e6)] == [0.0, 0.5, 1.0]
    assert sigmoid(1.25) == pytest.approx(1 / (1 + math.exp(-1.25)))
    assert math.isnan(sigmoid(math.nan))
