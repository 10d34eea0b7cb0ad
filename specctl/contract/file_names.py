"""Names of the files of a checkpoint that more than one part of the product looks for.

*Source:* transformers, safetensors, torch; Model-Optimizer (`hf_quant_config.json`); SpecForge
(`mask_embedding.pt`).
"""

from __future__ import annotations

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE_SINGLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"
QUANTIZATION = "hf_quant_config.json"
MASK_EMBEDDING = "mask_embedding.pt"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
