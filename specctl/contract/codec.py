"""Read and write manifests: YAML (or JSON) text <-> `Manifest`, strict in both directions.

Unknown keys name their nearest match; a value of the wrong type names its path; duplicate keys are
refused (YAML loaders keep the last one silently).
"""

from __future__ import annotations
