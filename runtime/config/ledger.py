"""What was given, where each settled value came from, and what was found wrong on the way."""

from __future__ import annotations

from dataclasses import fields
from typing import TypeVar

from runtime.config.values import ConfigOrigin, Overrides
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose, has_errors

_T = TypeVar("_T")

_LOWEST = {
    "kv_block_size": 1,
    "num_kv_blocks": 2,
    "max_num_requests": 1,
    "max_num_waiting": 0,
    "max_num_batched_tokens": 1,
    "prefill_chunk_size": 1,
    "max_model_len": 2,
    "num_speculative_tokens": 0,
    "max_ngram": 1,
    "dynamic_rows": 0,
    "dynamic_rank": 0,
    "tensor_parallel": 1,
    "draft_tensor_parallel": 1,
    "pipeline_parallel": 1,
    "rank_timeout_s": 0.5,
}
_HIGHEST = {"max_ngram": 32}  # the kernel of the look-up is unrolled by it
_SHORT = {
    "tensor_parallel": "--tp",
    "draft_tensor_parallel": "--draft-tp",
    "pipeline_parallel": "--pp",
    "stages_in_process": "--pp-in-process",
    "enable_prefix_cache": "--prefix-cache",
}


def option_name(setting: str) -> str:
    """Return the command-line spelling of a setting."""
    return _SHORT.get(setting) or "--" + setting.replace("_", "-")


class Ledger:
    """Collects origins and findings while settings are settled one after the other."""

    def __init__(self, given: Overrides) -> None:
        """Start with the ranges of what was given checked (SD832)."""
        self.given = given
        self.origins: dict[str, ConfigOrigin] = {}
        self.found: list[Diagnostic] = []
        self._check_ranges()

    def note(self, name: str, value: _T, origin: ConfigOrigin) -> _T:
        """Return the value after noting where it comes from."""
        self.origins[name] = origin
        return value

    def pick(self, name: str, otherwise: _T, *, origin: ConfigOrigin = "default") -> _T:
        """Return what was given for `name`, else `otherwise`, noting which."""
        given: _T | None = getattr(self.given, name)
        if given is None:
            return self.note(name, otherwise, origin)
        return self.note(name, given, "given")

    def refuse(
        self, code: str, name: str, message: str, *, expected: object, found: object
    ) -> None:
        """Collect a finding about a setting."""
        self.found.append(
            diagnose(code, where=option_name(name), message=message, expected=expected, found=found)
        )

    def idle(self, name: str, reason: str) -> None:
        """Collect SD805 about a given setting that nothing reads."""
        self.found.append(
            diagnose(
                "SD805",
                where=option_name(name),
                message=f"`{name}` has no effect: {reason}",
                found=getattr(self.given, name),
            )
        )

    def raise_errors(self) -> None:
        """Raise everything that was found if an error is among it."""
        if has_errors(self.found):
            raise DiagnosticError(self.found)

    def _check_ranges(self) -> None:
        for item in fields(Overrides):
            value, low = getattr(self.given, item.name), _LOWEST.get(item.name)
            if value is not None and low is not None and value < low:
                self._out_of_range(item.name, f"at least {low}")
            high = _HIGHEST.get(item.name)
            if value is not None and high is not None and value > high:
                self._out_of_range(item.name, f"at most {high}")
        fraction = self.given.kv_memory_fraction
        if fraction is not None and not 0 < fraction <= 1:
            self._out_of_range("kv_memory_fraction", "above 0, at most 1")
        buckets = self.given.batch_buckets
        if buckets is not None and (not buckets or min(buckets) < 1):
            self._out_of_range("batch_buckets", "one or more numbers, each at least 1")

        if min(self.given.prefill_buckets or (1,)) < 1:
            self._out_of_range("prefill_buckets", "numbers, each at least 1")

    def _out_of_range(self, name: str, expected: str) -> None:
        value = getattr(self.given, name)
        self.refuse("SD832", name, f"`{name}` is {value}", expected=expected, found=value)
