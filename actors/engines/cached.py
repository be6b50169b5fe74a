"""Generation by transformers' own forwards and caches, for layers that attend.py does not compute
(sliding windows, recurrent states). Exact and slow: no prefix is shared between requests, and a
model whose cache gives other values than its whole forward computes every token again."""

import collections
import time
from typing import Any

import torch

from coppice.actors.engines import decoder
from coppice.actors.engines.samples import ActiveRequest, Running, check_room
from coppice.wire.messages import GenerateRequest


class CachedBatch:
    """The requests of an engine for any causal language model. Each request has a cache of its own,
    with a row for each sample. places: samples that may still start. budget: bytes of all caches;
    a request has its part until its last sample ends."""

    def __init__(self, model: Any, places: int, budget: int, counts: collections.Counter[str]):
        self._model, self._counts = model.get_decoder(), counts
        self._head = decoder.Head(model)
        self.products = [self._head.product]
        self._device = model.device
        self._all_places = self._places = places
        self._budget = budget
        self._waiting: collections.deque[ActiveRequest] = collections.deque()
        self._rows: dict[ActiveRequest, list[Running]] = {}
        """The samples of each running request, in the order of its cache's rows."""
        self._caches: dict[ActiveRequest, Any] = {}
        self._token = self._rest = 0.0
        """Bytes of a sample's cache for each token, and beside them."""
        self._again = self._gap() > (2e-5 if model.dtype == torch.float32 else 0.05)
        """Compute whole sequences: the model's cache is not exact."""

    def __bool__(self) -> bool:
        return bool(self._waiting or self._rows)

    def check(self, request: GenerateRequest) -> None:
        check_room(request, self._needed(request), self._budget)

    def _needed(self, request: GenerateRequest) -> int:
        longest = len(request.tokens) + request.sampling.max_tokens
        return int(request.n * (self._rest + self._token * longest)) * (not self._again)

    def _fits(self, request: GenerateRequest) -> bool:
        held = sum(self._needed(active.request) for active in self._rows)
        return request.n <= self._places and held + self._needed(request) <= self._budget

    def add(self, active: ActiveRequest) -> None:
        self._waiting.append(active)

    def running(self) -> list[Running]:
        return [running for rows in self._rows.values() for running in rows]

    def step(self, version: int) -> tuple[list[Running], torch.Tensor | None]:
        """Run a forward for each running request and for those that start. Return the samples that
        get a token, and their logits [samples, vocabulary]."""
        hidden: list[torch.Tensor] = []
        for active, rows in self._rows.items():
            sampled, cache = [running.tokens for running in rows], self._caches[active]
            if cache is None:
                prompt = active.prompt.tolist()
                hidden.append(self.forward([prompt + tokens for tokens in sampled])[0][:, -1])
            else:
                last = [tokens[-1:] for tokens in sampled]
                hidden.append(self.forward(last, cache, rows[0].position)[0][:, -1])
        while self._waiting and self._fits(self._waiting[0].request):
            active = self._waiting.popleft()
            hidden.append(self._start(active, version))
        return self.running(), self._head.logits(torch.cat(hidden)) if hidden else None

    def _start(self, active: ActiveRequest, version: int) -> torch.Tensor:
        """Compute the prompt once and give each sample a row; return their states [n, hidden]."""
        n, active.version = active.request.n, version
        active.clock["prefill"] = time.monotonic()
        ending, cache = self.forward([active.prompt.tolist()])
        self._counts["prompt_tokens"] += len(active.prompt)
        self._counts["prefilled_tokens"] += len(active.prompt)
        cache.reorder_cache(torch.zeros(n, dtype=torch.long, device=self._device))
        self._caches[active] = None if self._again else cache
        active.clock["decode"] = time.monotonic()
        self._rows[active] = [Running(active, index, None) for index in range(n)]
        self._places -= n
        return ending[:, -1].expand(n, -1)

    def forward(
        self, tokens: list[list[int]], cache: Any = None, start: int = 0
    ) -> tuple[torch.Tensor, Any]:
        """Return the final states of tokens [rows, tokens, hidden] and the cache with them."""
        ids = torch.tensor(tokens, device=self._device)
        where = torch.arange(start, start + ids.shape[1], device=self._device)[None]
        out = self._model(
            input_ids=ids, position_ids=where.expand(len(ids), -1),
            past_key_values=cache, use_cache=True,
        )  # fmt: skip
        return out.last_hidden_state, out.past_key_values

    def _gap(self) -> float:
        """Return how far states by the cache are from those of one forward, relative to these. Also
        learns the bytes of a cache."""
        tokens = list(range(24))
        whole = self.forward([tokens])[0][0, 16:]
        cache, steps = self.forward([tokens[:16]])[1], list[torch.Tensor]()
        before = _bytes(cache)
        for place in range(16, 24):
            state, cache = self.forward([[tokens[place]]], cache, place)
            steps.append(state[0, 0])
        self._token = (_bytes(cache) - before) / 8
        self._rest = max(0.0, before - 16 * self._token)
        return float((torch.stack(steps) - whole).norm() / whole.norm())

    def leave(self, running: Running, keep: bool) -> None:
        """Remove a sample, and its request after the last."""
        rows = self._rows[running.owner]
        kept = [index for index, one in enumerate(rows) if one is not running]
        self._places += 1
        if not kept:
            del self._rows[running.owner], self._caches[running.owner]
            return
        self._rows[running.owner] = [rows[index] for index in kept]
        if (cache := self._caches[running.owner]) is not None:
            cache.reorder_cache(torch.tensor(kept, device=self._device))

    def remove(self, active: ActiveRequest) -> None:
        if active in self._waiting:
            self._waiting.remove(active)

    def clear(self) -> None:
        self._waiting.clear()
        self._rows.clear()
        self._caches.clear()
        self._places = self._all_places

    def forget(self) -> None:
        """No prefix is kept."""

    def stats(self) -> dict[str, float]:
        return {"running": sum(map(len, [*self._rows.values()]))}  # another thread changes it


def _bytes(cache: Any) -> int:
    """Return the bytes of a cache's layers, whose states are tensors or dicts of tensors."""
    held = [state for layer in cache.layers for state in vars(layer).values()]
    states = [one for s in held for one in (s.values() if isinstance(s, dict) else [s])]
    return sum(state.nbytes for state in states if isinstance(state, torch.Tensor))
