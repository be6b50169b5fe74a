"""What each actor's prefix cache probably holds: a radix tree of token ids per worker, which
forgets its least recently used leaves beyond the capacity, and everything at a new version."""

from collections import defaultdict

from coppice.common.radix import WIDTH, RadixTree


class Prefixes(RadixTree):
    """The prefixes that one cache holds. budget: infinite while its capacity is unknown."""

    def match(self, tokens: bytes) -> int:
        """The length in tokens of the longest held prefix of ``tokens``, which counts as no use."""
        return self._walk(tokens)[1]

    def insert(self, tokens: bytes) -> int:
        """Hold ``tokens`` as just used. Returns the tokens of it that were held before."""
        path, held, shared = self._walk(tokens)
        if path and shared * WIDTH < len(path[-1].tokens):
            path[-1] = path[-1].split(shared)
        if rest := tokens[held * WIDTH :]:
            path.append(self.edge(rest, path[-1] if path else self._root))
            self.bytes += len(rest)
        self._touch(path)
        self.limit(self.budget)
        return held


class Residency:
    """The caches of all workers."""

    def __init__(self) -> None:
        self._prompt = self._predicted = self._reported = 0
        self._caches: defaultdict[str, Prefixes] = defaultdict(Prefixes)
        self._versions: dict[str, int] = {}

    def limit(self, worker: str, capacity: float) -> None:
        """Set the capacity of the worker's cache in tokens."""
        self._caches[worker].limit(capacity * WIDTH)

    def capacity(self, worker: str) -> float:
        """The capacity of the worker's cache in tokens; infinite while it is unknown."""
        return self._caches[worker].budget / WIDTH

    def expect(self, worker: str, tokens: bytes) -> int:
        """How many prompt tokens should be cached; never the last, whose logits are needed."""
        return min(self._caches[worker].match(tokens), len(tokens) // WIDTH - 1)

    def started(self, worker: str, tokens: bytes) -> int:
        """A call was sent: count its prompt as resident. Returns what ``expect`` said before."""
        return min(self._caches[worker].insert(tokens), len(tokens) // WIDTH - 1)

    def sampled(self, worker: str, tokens: bytes, version: int) -> None:
        """A prompt with its continuation is resident, unless older weights began the sample."""
        if version > self._versions.get(worker, version):
            self.emptied(worker, version)
        if version == self._versions.setdefault(worker, version):
            self._caches[worker].insert(tokens)

    def emptied(self, worker: str, version: int) -> None:
        """The worker loaded weights of ``version``, so its cache is empty."""
        self._caches[worker] = Prefixes(self._caches[worker].budget)
        self._versions[worker] = version

    def forget(self, worker: str) -> None:
        self._caches.pop(worker, None)
        self._versions.pop(worker, None)

    def compare(self, prompt: int, predicted: int, reported: int) -> None:
        """A call was served: count its prompt tokens, those predicted as cached, and reported."""
        self._prompt += prompt
        self._predicted += predicted
        self._reported += reported

    def take(self) -> dict[str, float]:
        """Return the metrics since the last ``take``, none if no call was served."""
        prompt, predicted, reported = self._prompt, self._predicted, self._reported
        self._prompt = self._predicted = self._reported = 0
        if not prompt:
            return {}
        return {
            "cache/prompt_tokens": float(prompt),
            "cache/hit_rate": reported / prompt,
            "cache/predicted_hit_rate": predicted / prompt,
            "cache/prediction_error": (predicted - reported) / prompt,
        }
