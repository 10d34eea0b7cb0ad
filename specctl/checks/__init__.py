"""Pure functions from a normalized checkpoint to diagnostics; they read no files.

- `check_draft(draft: DraftCheckpoint) -> tuple[Diagnostic, ...]`
- `check_target(target: TargetCheckpoint) -> tuple[Diagnostic, ...]`
- `check_pair(draft: DraftCheckpoint, target: TargetCheckpoint) -> tuple[Diagnostic, ...]`: only what
  needs both; call it after `formats.complete_draft`.
"""
