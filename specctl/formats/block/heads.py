"""What each block algorithm has beside the backbone: config facts, sizes, and how they must agree.

*Source:* Speculators 0.9 dflash2 (local convolutions, candidate selector, full vocabulary only) and
xpress (refiner over the block); DSpark, arXiv 2607.05147; SpecForge Domino (prefix GRU).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from specctl.contract.findings import Findings
from specctl.contract.manifest import MarkovHead
from specctl.draft import Algorithm
from specctl.formats.assemble import BlockFacts
from specctl.formats.block import facts
from specctl.formats.block.places import Sections, settle
from specctl.formats.fields import Fields
from specctl.formats.names import Matched

SHAPING_KEYS: Mapping[str, tuple[str, ...]] = {
    "dflash2": ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    "xpress": ("xpress_rank", "xpress_mlp_ratio", "num_jacobi_passes"),
    "domino": ("emb_dim", "gru_hidden_dim"),
}
"""Integer fields of an algorithm's heads, which are also its `details`."""

_RANK_PLACES = (
    "markov_rank",
    "dspark_markov_rank",
    "dflash_config.markov_rank",
    "dspark_config.markov_rank",
)
_KIND_PLACES = (
    "markov_head_type",
    "dspark_markov_head_type",
    "dflash_config.markov_head_type",
    "dspark_config.markov_head_type",
)
_CONFIDENCE_PLACES = (
    "enable_confidence_head",
    "use_confidence_head",
    "dflash_config.enable_confidence_head",
    "dflash_config.use_confidence_head",
    "dspark_config.enable_confidence_head",
)
_WITH_MARKOV_PLACES = (
    "confidence_head_with_markov",
    "dflash_config.confidence_head_with_markov",
    "dspark_config.confidence_head_with_markov",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadFacts:
    """Heads of a block draft.

    Args:
        algorithm: whose heads they are.
        conditions: `when` words of the role table that hold.
        sizes: shape symbols that the config fixes by itself.
        details: fields by their config names.
        where: of the field that a contradiction is reported at.
    """

    algorithm: Algorithm
    markov: MarkovHead | None = None
    has_confidence: bool = False
    is_confidence_with_markov: bool = False
    conditions: frozenset[str] = frozenset()
    sizes: Mapping[str, int] = field(default_factory=dict)
    details: Mapping[str, object] = field(default_factory=dict)
    where: Callable[[str], str] = str

    def sizes_at(self, draft_block_size: int | None) -> Mapping[str, int]:
        """Return the shape symbols, with the block among them."""
        block = {} if draft_block_size is None else {"B": draft_block_size}
        return {**self.sizes, **block}

    def block(
        self,
        *,
        mask_token_id: int | None,
        sample_from_anchor: bool | None,
        draft_block_size: int | None,
    ) -> BlockFacts:
        """Return the facts of the block that these heads belong to."""
        return BlockFacts(
            mask_token_id=mask_token_id,
            markov=self.markov,
            has_confidence_head=self.has_confidence,
            is_confidence_with_markov=self.is_confidence_with_markov,
            sample_from_anchor=sample_from_anchor,
            draft_block_size=draft_block_size,
        )

    def check(
        self,
        findings: Findings,
        block: BlockFacts,
        *,
        hidden_size: int | None,
        target_vocab_size: int | None,
        draft_vocab_size: int | None,
    ) -> None:
        """Report what only DFlash2 forbids: SD320, SD321 and SD323."""
        if self.algorithm != "dflash2":
            return
        if draft_vocab_size != target_vocab_size:
            findings.add(
                "SD320",
                where=self.where("draft_vocab_size"),
                message=f"a DFlash2 draft of {draft_vocab_size} ids for {target_vocab_size}",
                expected=target_vocab_size,
                found=draft_vocab_size,
            )
        if block.sample_from_anchor:
            findings.add(
                "SD321",
                where=self.where("sample_from_anchor"),
                message="`sample_from_anchor` is true; DFlash2's slot 0 is never a prediction",
                expected="false",
                found="true",
            )
        taps, group = self.sizes.get("K"), self.details.get("conv_group_size")
        size = block.draft_block_size
        if taps is not None and size is not None and taps > size:
            findings.add(
                "SD323",
                where=self.where("conv_kernel_size"),
                message=f"{taps} convolution taps reach past a block of {size}",
                expected=f"1 to {size}",
                found=taps,
            )
        if isinstance(group, int) and hidden_size is not None and hidden_size % group:
            findings.add(
                "SD323",
                where=self.where("conv_group_size"),
                message=f"{hidden_size} channels cannot be cut into groups of {group}",
                expected=f"a divisor of {hidden_size}",
                found=group,
            )


def read_heads(
    algorithm: Algorithm, sections: Sections, matched: Matched, layers: Fields
) -> HeadFacts:
    """Return the heads that an algorithm has.

    Args:
        algorithm: of the draft.
        sections: of the config.
        matched: tensors by role.
        layers: object with `hidden_size`.
    """
    if algorithm == "dspark":
        return _dspark(sections, matched, layers.integer("hidden_size"))
    keys = SHAPING_KEYS.get(algorithm, ())
    details = {key: value for key in keys if (value := _integer(sections, key)) is not None}
    return HeadFacts(
        algorithm=algorithm,
        sizes=_sizes(algorithm, details, layers.integer("hidden_size")),
        details=details,
        where=_finder(sections),
    )


def _dspark(sections: Sections, matched: Matched, hidden_size: int | None) -> HeadFacts:
    markov = facts.read_markov(
        matched, rank=sections.places(*_RANK_PLACES), kind=sections.places(*_KIND_PLACES)
    )
    has_confidence, with_markov = facts.read_confidence(
        matched,
        markov,
        enabled=sections.places(*_CONFIDENCE_PLACES),
        with_markov=sections.places(*_WITH_MARKOV_PLACES),
    )
    read = markov.rank if markov is not None and with_markov else 0
    return HeadFacts(
        algorithm="dspark",
        sizes={} if hidden_size is None else {"C": hidden_size + read},
        markov=markov,
        has_confidence=has_confidence,
        is_confidence_with_markov=with_markov,
        conditions=facts.head_conditions(markov, has_confidence),
        where=_finder(sections),
    )


def _integer(sections: Sections, key: str) -> int | None:
    places = sections.places(f"dflash_config.{key}", key)
    place = settle(places) or places[0]
    return place.fields.integer(key, is_required=True)


def _finder(sections: Sections) -> Callable[[str], str]:
    def find(key: str) -> str:
        places = sections.places(f"dflash_config.{key}", key)
        return next((p.where for p in places if p.fields.has(key)), places[-1].where)

    return find


def _sizes(
    algorithm: Algorithm, details: Mapping[str, int], hidden_size: int | None
) -> dict[str, int]:
    found: dict[str, int | None] = {}
    if algorithm == "dflash2":
        group = details.get("conv_group_size")
        found = {
            "K": details.get("conv_kernel_size"),
            "M": details.get("selector_rank"),
            "CG": None if group is None or hidden_size is None else hidden_size // group,
        }
    elif algorithm == "xpress":
        rank, ratio = details.get("xpress_rank"), details.get("xpress_mlp_ratio")
        found = {"M": rank, "F": None if rank is None or ratio is None else rank * ratio}
    elif algorithm == "domino":
        found = {"E": details.get("emb_dim"), "G": details.get("gru_hidden_dim")}
    return {symbol: size for symbol, size in found.items() if size is not None}
