"""The default corpus and questions: one-fact passages about countries (NOTICE names their source),
and templated one- and two-hop questions over them. Countries, not rows, are split into train, warm
(for supervised traces) and held-out."""

import hashlib
import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from coppice.common.atomic import drafted
from coppice.judges.retriever.http_client import title_and_text

PASSAGES = Path(__file__).with_name("countries.jsonl")
"""The corpus: passages of 18 fields of 234 countries, in the order of the countries."""
VERSION = 3
"""The version of this builder. A cached result of another version is made anew."""

BRIDGES = ("Capital", "Highest point", "Internet code", "National anthem", "Demonym", "Legislature")
"""Fields that can name a country in a two-hop question: a field does so where its value is unique.
"""

_ONE_HOP = ("What is the {field} of {entity}?", "Name the {field} of {entity}.")
_TWO_HOP = (
    "What is the {field} of the country whose {bridge} is {value}?",
    "Name the {field} of the country whose {bridge} is {value}.",
)
_TWO_HOP_EACH_BRIDGE = 2


class Fact(msgspec.Struct, frozen=True):
    """One passage of the corpus: the value of one field of one country."""

    title: str
    field: str
    value: str
    passage_id: str


def countries(corpus: Path = PASSAGES) -> dict[str, dict[str, Fact]]:
    """Return the facts of a corpus of one-fact passages by country and field."""
    facts: dict[str, dict[str, Fact]] = {}
    for line in corpus.read_text().splitlines():
        row = json.loads(line)
        title, text = title_and_text(row["contents"])
        field, _, value = text.partition(": ")
        facts.setdefault(title, {})[field] = Fact(title, field, value, row["id"])
    return facts


def split_of(entity: str) -> str:
    """Return "heldout" (30%), "warm" (20%) or "train", chosen by a hash of the entity."""
    place = int(hashlib.sha256(f"coppice/{entity}".encode()).hexdigest(), 16) % 100
    return "heldout" if place < 30 else "warm" if place < 50 else "train"


def questions(facts: dict[str, dict[str, Fact]]) -> Iterator[dict[str, Any]]:
    """Yield one one-hop question per fact, and two-hop questions over each unique bridge."""
    rng = random.Random(0)
    seen = {f: Counter(own[f].value for own in facts.values() if f in own) for f in BRIDGES}
    for entity, own in facts.items():
        for fact in own.values():
            yield _row(rng.choice(_ONE_HOP).format(field=fact.field.lower(), entity=entity), [fact])
        for bridge in BRIDGES:
            if bridge not in own or seen[bridge][own[bridge].value] != 1:
                continue
            others = [f for f in own.values() if f.field != bridge and f.value != own[bridge].value]
            for fact in rng.sample(others, min(_TWO_HOP_EACH_BRIDGE, len(others))):
                text = rng.choice(_TWO_HOP).format(
                    field=fact.field.lower(), bridge=bridge.lower(), value=own[bridge].value
                )
                yield _row(text, [own[bridge], fact])


def _row(question: str, evidence: list[Fact]) -> dict[str, Any]:
    entity = evidence[-1].title
    identity = hashlib.sha256(question.encode()).hexdigest()[:12]
    return {
        "id": identity,
        "question": question,
        "golden_answers": [evidence[-1].value],
        "data_source": "factbook",
        "hops": len(evidence),
        "entity": entity,
        "split": split_of(entity),
        "evidence": [msgspec.to_builtins(fact) for fact in evidence],
    }


def build(out: Path) -> dict[str, int]:
    """Write all files to a draft folder, rename it to ``out``, and return the counts."""
    facts = countries()
    rows = list(questions(facts))
    counts = {"entities": len(facts), "passages": sum(map(len, facts.values()))}
    with drafted(out, replace=True) as draft:
        shutil.copyfile(PASSAGES, draft / "corpus.jsonl")
        for split in ("train", "warm", "heldout"):
            split_rows = [row for row in rows if row["split"] == split]
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in split_rows)
            (draft / f"{split}.jsonl").write_text("".join(lines))
            for hops in (1, 2):
                counts[f"{split} {hops} hop"] = sum(row["hops"] == hops for row in split_rows)
    return counts


def ensure_facts(cache: Path) -> Path:
    """Return the folder of the cached default data, after building it if it is absent."""
    out = cache / "facts" / f"v{VERSION}"
    if not (out / "corpus.jsonl").is_file():
        counts = build(out)
        told = ", ".join(f"{count} {name}" for name, count in counts.items())
        print(f"default data: {told}", flush=True)
    return out
