"""The whole table."""

from __future__ import annotations

from specctl.verdicts.rule import Rule
from specctl.verdicts.sglang import SGLANG_RULES
from specctl.verdicts.tensorrt_llm import TENSORRT_LLM_RULES
from specctl.verdicts.vllm import VLLM_RULES

RULES: tuple[Rule, ...] = (*VLLM_RULES, *SGLANG_RULES, *TENSORRT_LLM_RULES)
