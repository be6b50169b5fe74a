"""Policies so small that two CPU cores train them in minutes: Llamas with random weights and
tokenizers of their own. Warm starts teach them the notation.

``BOARD`` reads and writes characters, for games. ``SEARCH`` has one token per name of the default
corpus (a name is copied without being spelt) and byte-level BPE; ``AGENT`` is the same with the
tokens of a tool call. In these two each attention layer starts by writing back what it reads (its
output matrix is the transpose of its orthogonal value matrix), so that the policy has only to learn
where to look; other initial weights needed many times as many steps.
"""

import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerFast

from coppice.common.atomic import drafted
from coppice.tools.defaults.facts import countries

BOARD, SEARCH, AGENT = "tiny-board", "tiny-search", "tiny-agent"
"""The values of ``model.name`` that select these policies."""
SPECIAL = ("<s>", "</s>", "<pad>")
MOVE_TAGS = ("<action>", "</action>")
"""Each tag is one token of plain text, which decoding keeps; so are those below."""
CHARACTERS = "\n" + "".join(sorted(set(string.printable) - set(string.whitespace) | {" "}))
SEARCH_TAGS = tuple(
    f"<{end}{tag}>" for tag in ("think", "search", "answer", "information") for end in ("", "/")
)
SENTENCES = (
    "Question: What is the of the country whose is ?",
    "Name the of the country whose is .",
    " I need the of . I look it up. The is . I know it. I must answer.",
    "Doc 1(Title: ) Doc 2(Title: ) Doc 3(Title: ) No results found.",
    "That action could not be used. Write to look something up, or to finish, after a block."
    " Try once more.",
)
"""Sentences whose words become tokens, in addition to the fields of the corpus."""
INSTRUCTIONS = "Answer the question."
"""The system message of an agent's warm start. An agent that sends another one begins with a policy
that has never read it."""
CALL, CALLED = '<tool_call>{"name": "search", "arguments": {"query": "', '"}}</tool_call>'
"""What stands around an agent's query."""
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{{ '\\n' }}{% endfor %}"
"""Writes a newline after each message, so that the policy's turn is a new line."""
AGENT_TEMPLATE = (
    "{% for tool in tools or [] %}Tool: {{ tool['function']['name'] }}{{ '\\n' }}{% endfor %}"
    "{% for m in messages %}{{ m['content'] }}{% for call in m['tool_calls'] or [] %}"
    "<tool_call>{{ {'name': call['function']['name'],"
    " 'arguments': call['function']['arguments']} | tojson }}</tool_call>"
    "{% endfor %}{{ '\\n' }}{% endfor %}"
)
"""Names the tools, too."""
WRITTEN = 0.5
"""The share of its input that an attention layer writes back at the start."""


def names_and_fields(corpus: Path) -> tuple[list[str], list[str]]:
    """Return, each sorted, the distinct names (titles and values) and the distinct fields of a
    corpus of one-fact passages."""
    facts = [fact for own in countries(corpus).values() for fact in own.values()]
    names = {name for fact in facts for name in (fact.title, fact.value)}
    return sorted(names), sorted({fact.field for fact in facts})


def board_tokenizer() -> PreTrainedTokenizerFast:
    """Return the character tokenizer. Text of ``CHARACTERS`` and ``MOVE_TAGS`` survives encoding
    and decoding unchanged."""
    special = (*SPECIAL, "<unk>")
    vocabulary = {token: i for i, token in enumerate((*special, *CHARACTERS))}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    core.decoder = tokenizers.decoders.Fuse()  # pyright: ignore
    core.add_special_tokens(list(special))
    return _wrapped(core, MOVE_TAGS, unk_token="<unk>")


def search_tokenizer(
    names: Sequence[str], fields: Sequence[str], *sentences: str
) -> PreTrainedTokenizerFast:
    """Return the tokenizer. Any text survives encoding and decoding unchanged, and " Name" is one
    token. sentences: whose words are tokens too."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    levels: Any = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.pre_tokenizer = levels
    core.decoder = tokenizers.decoders.ByteLevel()  # pyright: ignore
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=2048, special_tokens=list(SPECIAL), show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    words = [*SENTENCES, *sentences, *(f"{field}: x {field.lower()} of" for field in fields)]
    core.train_from_iterator(words * 2, trainer)
    return _wrapped(core, (*SEARCH_TAGS, *(f" {name}" for name in names)))


def _wrapped(
    core: tokenizers.Tokenizer, whole: Sequence[str], **special: str
) -> PreTrainedTokenizerFast:
    """As transformers reads it, with the usual special tokens and others, and with texts that are
    one token each."""
    core.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in whole])
    words = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        clean_up_tokenization_spaces=False, **special,
    )  # fmt: skip
    words.chat_template = TEMPLATE
    return words


def make_board(
    folder: Path, seed: int = 0, hidden: int = 128, layers: int = 4, heads: int = 16,
    intermediate: int = 256,
) -> Path:  # fmt: skip
    """Write the model folder of ``BOARD``, of 0.7 million parameters with the default sizes.

    With the usual standard deviation of 0.02 of the initial weights, attention starts uniform and
    for long singles out no cell. The base of the rotary wavelengths is small because a board is
    tens of characters away, not thousands.
    """
    return _save(folder, board_tokenizer(), seed, (hidden, layers, heads, intermediate), 0.12, 1e2)


def make_search(
    folder: Path, corpus: Path, hidden: int = 128, layers: int = 2, heads: int = 4,
    agent: bool = False,
) -> Path:  # fmt: skip
    """Write the model folder of ``SEARCH`` or, as an ``agent``, of ``AGENT``: about 0.6 million
    parameters, rotary wavelengths for episodes of about a hundred tokens."""
    own = [f"Tool: search {INSTRUCTIONS}"] if agent else []
    words = search_tokenizer(*names_and_fields(corpus), *own)
    if agent:
        tokens: Any = [tokenizers.AddedToken(text, normalized=False) for text in (CALL, CALLED)]
        words.add_tokens(tokens)
        words.chat_template = AGENT_TEMPLATE
    return _save(folder, words, 0, (hidden, layers, heads, 2 * hidden), 0.05, 1e3, WRITTEN)


def _save(
    folder: Path, words: Any, seed: int, shape: tuple[int, int, int, int], initial: float,
    rope_base: float, written: float = 0.0,
) -> Path:  # fmt: skip
    """Save a Llama with random weights and its tokenizer (``words``). shape: hidden size, layers,
    heads, intermediate size. written: the share that attention writes back, 0 for none."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    hidden, layers, heads, intermediate = shape
    settings = LlamaConfig(
        vocab_size=len(words), hidden_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, intermediate_size=intermediate,
        max_position_embeddings=1024, tie_word_embeddings=True, initializer_range=initial,
        rope_parameters={"rope_type": "default", "rope_theta": rope_base},
        bos_token_id=words.bos_token_id, eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
        for layer in model.model.layers if written else ():
            values = torch.nn.init.orthogonal_(layer.self_attn.v_proj.weight.data)
            layer.self_attn.o_proj.weight.data.copy_(written * values.T)
    with drafted(folder, replace=True) as draft:
        model.save_pretrained(draft)
        words.save_pretrained(draft)
    return folder
