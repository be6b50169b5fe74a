"""The classes, under the name by which sglang looks for them."""

from sglang.srt.models.gemma3_causal import Gemma3ForCausalLM  # pyright: ignore
from sglang.srt.models.llama import LlamaForCausalLM  # pyright: ignore
from sglang.srt.models.qwen2 import Qwen2ForCausalLM  # pyright: ignore
from sglang.srt.models.qwen3 import Qwen3ForCausalLM  # pyright: ignore

EntryClass = [LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Gemma3ForCausalLM]
