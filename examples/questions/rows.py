"""Writes corpus.jsonl, train.jsonl and heldout.jsonl from a table of Python. Replace the table."""

import errno
import json
import os

corpus, train, heldout = [], [], []
for place, (number, name) in enumerate(sorted(errno.errorcode.items())):
    meaning = os.strerror(number)
    text = f"The error {name} has the number {number}. It means {meaning}."
    corpus.append({"id": name, "contents": f'"{name}"\n{text}'})
    answers = {f"What does {name} mean?": meaning, f"What is the number of {name}?": str(number)}
    for question, answer in answers.items():
        row = {"question": question, "golden_answers": [answer]}
        row["evidence"] = [{"title": name, "text": text}]
        (train if place % 3 else heldout).append(row)
for file, rows in {"corpus": corpus, "train": train, "heldout": heldout}.items():
    with open(f"{file}.jsonl", "w") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)
