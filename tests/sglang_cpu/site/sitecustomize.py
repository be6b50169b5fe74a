"""What a CPU process of sglang finds in place of packages that come only with a GPU; loaded by
Python itself at start."""

from __future__ import annotations

import placeholders

placeholders.install(placeholders.Finder("triton", placeholders.triton))
for name in (
    "torchvision tvm_ffi compressed_tensors openai_harmony xgrammar gguf zstandard soundfile"
    " watchfiles jsonschema"
).split():
    placeholders.install(placeholders.Finder(name))
