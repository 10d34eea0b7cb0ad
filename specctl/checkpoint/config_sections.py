"""Where a config.json keeps a model's fields: at its root, or in an object inside it.

*Source:* transformers multimodal configs; Speculators `SpeculatorModelConfig`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

TEXT_SECTIONS = ("text_config", "language_config", "llm_config", "thinker_config")
"""Objects in which a multimodal target keeps the fields of its text model."""

QUANTIZATION_SECTIONS = ("quantization_config", "compression_config")
"""Objects that say how weights are stored, at the root or in one of the others."""

LAYER_SECTION = "transformer_layer_config"
"""Object in which a Speculators draft keeps the fields of its layers."""


def model_sections(config: Mapping[str, object]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield the name and the object of each place that may state a model's fields.

    The root comes first, under an empty name.
    """
    yield "", config
    for name in (*TEXT_SECTIONS, LAYER_SECTION):
        section = config.get(name)
        if isinstance(section, Mapping):
            yield name, section


def stated(config: Mapping[str, object], key: str) -> object:
    """Return the first value of a field that a place states; None when none does."""
    values = (section.get(key) for _, section in model_sections(config))
    return next((value for value in values if value is not None), None)


def named_target(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return what a Speculators config says of its target, empty without it."""
    section = config.get("speculators_config")
    target = section.get("verifier") if isinstance(section, Mapping) else None
    return target if isinstance(target, Mapping) else {}


def named_architectures(config: Mapping[str, object]) -> list[str]:
    """Return the architectures of the target that a Speculators config names."""
    names = named_target(config).get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
