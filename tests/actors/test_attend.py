"""The attention of a step, by torch and by the kernels for some CPUs, against a naive one."""

import types

import pytest
import torch

from coppice.actors.engines import attend, decoder, kernels
from coppice.actors.engines.memory import KVMemory

SHARED, HEADS, WIDTH = 3, 2, 40


@pytest.fixture(params=["torch", "kernels"], autouse=True)
def computed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(kernels, "suit", lambda like: False)
    elif not kernels.suit(torch.zeros(1)):
        pytest.skip("no kernels for this CPU are installed")


def naive(query: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return what the last rows of ``kept`` [tokens, 2, heads, width] attend to."""
    keys, values = kept.double().repeat_interleave(SHARED, 2).permute(1, 2, 0, 3)
    scores = torch.einsum("qhw,hkw->hqk", query.double(), keys) * 0.3
    scores = scores.masked_fill(
        torch.ones(scores.shape[1:]).triu(len(kept) - len(query) + 1) > 0, -torch.inf
    )
    return torch.einsum("hqk,hkw->qhw", scores.softmax(-1), values)


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_chunks_attend_to_their_prefixes_and_themselves(dtype: torch.dtype, near: float) -> None:
    torch.manual_seed(0)
    memory = KVMemory(torch.empty(1, 2, HEADS, WIDTH, dtype=dtype), 2**26, 512)
    owners = [types.SimpleNamespace(n=1) for _ in range(2)]
    prefixes = []
    for owner in owners:
        shelf, _ = memory.reserve(400, 1, 4) or pytest.fail("no room")
        prefixes.append(shelf.put(owner))
    kept = [torch.empty(0, 2, HEADS, WIDTH, dtype=dtype) for _ in prefixes]
    for counts in ((300, 7), (1, attend.PIECE), (90, 2)):
        chunks = [attend.Chunk(*pair) for pair in zip(prefixes, counts, strict=True)]
        rows = torch.randn(sum(counts), SHARED * HEADS + 2 * HEADS, WIDTH).to(dtype)
        query, new = rows.split([SHARED * HEADS, 2 * HEADS], 1)
        new = new.unflatten(1, (2, HEADS))
        plan = attend.AttentionPlan([], chunks)
        out = plan.attend(0, query, new, 0.3)
        last = plan.attend(0, query, new, 0.3, final=True)
        torch.testing.assert_close(last, out[plan.final], rtol=near, atol=near)
        parts = zip(out.split(counts), query.split(counts), new.split(counts), strict=True)
        for i, (got, asked, added) in enumerate(parts):
            kept[i] = torch.cat((kept[i], added))
            torch.testing.assert_close(got.double(), naive(asked, kept[i]), rtol=near, atol=near)
            prefixes[i].length += counts[i]


def test_kernels_are_not_loaded_beside_another_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "1.13.0")
    assert kernels._zen.__wrapped__() is None


@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_torchs(rows: int, dtype: torch.dtype) -> None:
    hidden, weight = torch.randn(rows, 96).to(dtype), torch.randn(96).to(dtype)
    norm = types.SimpleNamespace(weight=weight, variance_epsilon=1e-5)
    expected = torch.nn.functional.rms_norm(hidden.double(), (96,), weight.double(), 1e-5)
    near = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(
        decoder._normed(hidden, norm).double(), expected, rtol=near, atol=near
    )
    heads = hidden.expand(3, rows, 96).transpose(0, 1)  # not contiguous
    torch.testing.assert_close(
        decoder._normed(heads, norm).double(),
        expected[:, None].expand_as(heads),
        rtol=near,
        atol=near,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_alone_is_computed_as_what_is_merged(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 4, 1, 9, WIDTH).to(dtype)
    mask = torch.zeros(4, 1, 1, 9, dtype=dtype)
    mask[1, ..., 5:] = mask[3, ..., 1:] = -torch.inf
    for given in (None, mask):
        alone = attend._attention(query, key, value, given, 0.3, alone=True)[0]
        merged = attend._attention(query, key, value, given, 0.3)[0]
        near = 1e-5 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(alone, merged, rtol=near, atol=near)
