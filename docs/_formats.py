"""The formats page: tensor roles and the names that every dialect gives them."""

from __future__ import annotations

from collections.abc import Mapping

from docs._registry import format_table
from docs._table import table
from specctl.contract.roles import ROLES_BY_ALGORITHM, SHAPE_SYMBOLS, TARGET_ROLES, TensorRole
from specctl.formats import huggingface
from specctl.formats.block.roles import BLOCK_SYMBOLS
from specctl.formats.block.tables import TABLES as BLOCK_TABLES
from specctl.formats.eagle.roles import MLA_SYMBOLS
from specctl.formats.eagle.tables import TABLES as EAGLE_TABLES
from specctl.formats.heads.tables import SYMBOLS as HEAD_SYMBOLS
from specctl.formats.heads.tables import TABLES as HEAD_TABLES
from specctl.formats.mtp import families as mtp_families
from specctl.formats.mtp import generic
from specctl.formats.names import NameTable


def formats_page(notice: str) -> str:
    """Return the page; `notice` says that it is generated."""
    lines = ["# Formats", "", notice, "", *format_table(table), "", "# Tensor roles", ""]
    lines += ["Canonical tensor roles, their shapes and when a file must hold them. Shapes are as"]
    lines += ["stored, [out, in] for linears.", ""]
    lines += [*symbol_table(SHAPE_SYMBOLS), ""]
    for title, roles in ROLES_BY_ALGORITHM.items():
        lines += [f"## {title}", "", *role_table(roles), ""]
    lines += ["## target", "", *role_table(TARGET_ROLES), ""]
    lines += ["## Other EAGLE drafts", "", "Latent attention has sizes of its own:", ""]
    lines += role_sections(MLA_SYMBOLS, {title: roles for title, _, roles in eagle_tables()})
    lines += ["## Other block drafts", "", "Beside the symbols above:", ""]
    lines += role_sections(BLOCK_SYMBOLS, {t: e.roles for t, e in BLOCK_TABLES.items()})
    lines += ["## Drafts of numbered heads", "", "Beside the symbols above:", ""]
    lines += role_sections(HEAD_SYMBOLS, {t: e.roles for t, e in HEAD_TABLES.items()})
    lines += ["# Prediction layers in targets", "", *family_table(), ""]
    lines += ["# Names in files", ""]
    for title, names in dialects().items():
        lines += [f"## {title}", "", *name_table(names), ""]
    return "\n".join(lines).rstrip() + "\n"


def symbol_table(symbols: Mapping[str, str]) -> list[str]:
    return table(("symbol", "size"), ((f"`{s}`", text) for s, text in symbols.items()))


def role_sections(
    symbols: Mapping[str, str], tables: Mapping[str, tuple[TensorRole, ...]]
) -> list[str]:
    """Return symbols and role tables of a family; those of the algorithms stand before."""
    lines = [*symbol_table(symbols), ""]
    for title, roles in tables.items():
        if roles not in ROLES_BY_ALGORITHM.values():
            lines += [f"### {title}", "", *role_table(roles), ""]
    return lines


def dialects() -> dict[str, NameTable]:
    """Return the name table of every dialect."""
    return {
        **{title: names for title, names, _ in eagle_tables()},
        **block_names(),
        "speculators-mtp": generic.names_of(generic.empty_part(mtp_families.SPECULATORS, 0)),
        "deepseek-mtp (target of 30 layers)": generic.names_of(
            generic.empty_part(mtp_families.DEEPSEEK, 30)
        ),
        **{title: example.names for title, example in HEAD_TABLES.items()},
        "huggingface (target, and pard)": huggingface.NAMES,
    }


def block_names() -> dict[str, NameTable]:
    """Return the names of the block dialects; formats with equal tables are one entry."""
    titles: dict[str, NameTable] = {}
    for title, entry in BLOCK_TABLES.items():
        if entry.names not in titles.values():
            titles[title] = entry.names
    return titles


def eagle_tables() -> list[tuple[str, NameTable, tuple[TensorRole, ...]]]:
    """Return formats, names and roles of the EAGLE dialects; equal tables are one entry."""
    groups: list[tuple[list[str], NameTable, tuple[TensorRole, ...]]] = []
    for name, entry in EAGLE_TABLES.items():
        same = next((g for g in groups if g[1] == entry.names and g[2] == entry.roles), None)
        if same is None:
            groups.append(([name], entry.names, entry.roles))
        else:
            same[0].append(name)
    return [(", ".join(titles), names, roles) for titles, names, roles in groups]


def family_table() -> list[str]:
    """Return one row for each family of prediction layers."""
    columns = ("format", "layer", "fuse tensors", "input order", "norm", "count in config")
    return table(
        columns,
        (
            (
                f"`{family.name}`",
                f"`{family.roots[0]}{family.block}`",
                ", ".join(f"`{key}`" for role, key in family.names if role.startswith("fc")),
                family.concat_order,
                family.norm_weight,
                ", ".join(f"`{key}`" for key in family.count_fields) or "none",
            )
            for family in mtp_families.FAMILIES
        ),
    )


def name_table(names: NameTable) -> list[str]:
    spellings: dict[str, list[str]] = {}
    for row in names.names:
        spellings.setdefault(row.role, []).extend(f"`{key}`" for key in row.keys)
    lines = table(
        ("role", "keys; the first is written"),
        ((f"`{role}`", ", ".join(keys)) for role, keys in spellings.items()),
    )
    if names.ignored:
        lines += ["", "Known and not used:", ""]
        lines += [f"- `{entry.pattern}`: {entry.reason}" for entry in names.ignored]
    return lines


def role_table(roles: tuple[TensorRole, ...]) -> list[str]:
    return table(
        ("role", "shape", "required when"),
        ((f"`{role.name}`", f"[{', '.join(role.shape)}]", role.when) for role in roles),
    )
