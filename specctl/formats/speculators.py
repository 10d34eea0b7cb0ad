"""What the three Speculators dialects share: proposal methods, target's name, layer config.

*Source:* vllm-project/speculators 0.5 to 0.9 (`SpeculatorsConfig`, `GreedyTokenProposalConfig`).
"""

from __future__ import annotations

from specctl.formats.fields import Fields
from specctl.formats.model_types import CLASS_DEFAULTS, Family, defaults_rule, read_family

GAMMA_PATH = "geometry.num_speculative_tokens"


def read_token_count(root: Fields, model_type: str) -> int | None:
    """Return the declared token count, having checked the section that holds it.

    Diagnostics: SD206 (no `speculators_config`), SD207, SD208 (algorithm), SD209, SD210, SD301.
    """
    section = root.section("speculators_config")
    if section is None:
        if not root.has("speculators_config"):
            root.integer("speculators_config", is_required=True)
        return None
    algorithm = section.text("algorithm")
    if algorithm is not None and algorithm != model_type:
        root.findings.add(
            "SD208",
            where=section.where("algorithm"),
            message=f"`algorithm` is `{algorithm}` and `speculators_model_type` is `{model_type}`",
            expected=f"`{model_type}` in both",
            found=f"`{algorithm}`",
        )
    tokens = _speculative_tokens(section)
    _check_target_name(section)
    return tokens


def layer_fields(root: Fields, *, absent_model_type: Family) -> tuple[Fields, Family | None]:
    """Return the nested layer config with its class's defaults, and the family.

    The config is a difference to those defaults. Diagnostics: SD206, SD203 (another model type).

    Args:
        root: config root.
        absent_model_type: class that the library takes when the section names none.
    """
    key = "transformer_layer_config"
    section = root.section(key)
    if section is None:
        if not root.has(key):
            root.integer(key, is_required=True)
        empty = Fields(data={}, pointer=f"/{key}", findings=root.findings)
        return empty, None
    family = read_family(section, absent_model_type=absent_model_type)
    if family is None:
        return section, None
    rule = f"{defaults_rule(family)} (the config is a difference to it)"
    return section.with_defaults(CLASS_DEFAULTS[family], rule), family


def _speculative_tokens(section: Fields) -> int | None:
    """Return the default method's count; SD210, SD207 or SD301 when there is none."""
    methods = section.raw("proposal_methods")
    entries = methods if isinstance(methods, list) else []
    default = section.text("default_proposal_method")
    for index, entry in enumerate(entries):
        if isinstance(entry, dict) and (default is None or entry.get("proposal_type") == default):
            fields = Fields(
                data=entry,
                pointer=f"{section.pointer}/proposal_methods/{index}",
                findings=section.findings,
            )
            tokens = fields.integer("speculative_tokens", GAMMA_PATH)
            if tokens is None and not fields.has("speculative_tokens"):
                report_gamma_missing(section, fields.where("speculative_tokens"))
            return tokens
    if methods is not None and not isinstance(methods, list):
        section.findings.add(
            "SD207",
            where=section.where("proposal_methods"),
            message="`proposal_methods` is not a list of objects",
            expected="a list of objects",
            found=type(methods).__name__,
        )
    elif not entries:
        report_gamma_missing(section, section.where("proposal_methods"))
    else:
        names = [entry.get("proposal_type") for entry in entries if isinstance(entry, dict)]
        section.findings.add(
            "SD210",
            where=section.where("default_proposal_method"),
            message=f"`{default}` is no `proposal_type` of `proposal_methods`",
            expected=" or ".join(str(name) for name in names) or "an object with `proposal_type`",
            found=default,
        )
    return None


def _check_target_name(section: Fields) -> None:
    target = section.section("verifier")
    if target is None or target.text("name_or_path") is None:
        section.findings.add(
            "SD209",
            where=section.where("verifier") + "/name_or_path",
            message="the config does not name the target it belongs to",
            expected="a hub id",
            found="nothing",
        )


def report_gamma_missing(root: Fields, where: str) -> None:
    """Report SD301: the file has no token count, which the user then gives."""
    root.findings.add(
        "SD301",
        where=where,
        message="the file does not say how many tokens to draft in a round",
        expected="a token count",
        found="nothing",
    )
