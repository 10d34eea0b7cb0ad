"""On-disk dialects: detect, read; name tables are two-way data.

- `detect(checkpoint: Checkpoint) -> Detection`: total and unique, by config and tensors only.
- `read_draft(checkpoint: Checkpoint) -> DraftCheckpoint`: raises `DiagnosticError` (SD201, SD202) when
  it is no draft; every other defect is in `.diagnostics`.
- `read_target(checkpoint: Checkpoint) -> TargetCheckpoint`: likewise for a target.
- `complete_draft(draft: DraftCheckpoint, target: TargetCheckpoint) -> DraftCheckpoint`: closes the facts
  that only the target decides (SafeAILab taps from its layer count).
- `with_given(draft, *, num_speculative_tokens=None, aux_layer_ids=None, aux_numbering=None,
  sample_from_anchor=None, has_norm_before_residual=None) -> DraftCheckpoint`: facts given by the user,
  origin `given`.
"""
