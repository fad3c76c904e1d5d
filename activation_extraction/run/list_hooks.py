"""--list_hooks: the hooks of a model with all their names, and how much each of them stores.

The names come from the hook table; this module only formats them.
"""

from collections.abc import Sequence
from typing import Any

from activation_extraction.common.positions import ALL, parse_positions
from activation_extraction.inspect.status import ranges
from activation_extraction.model.hooks import HookTable

COLUMNS = "hook", "Hugging Face module", "width", "bytes/token", "other names"


def list_hooks(table: HookTable, config: Any, dtype: Any, rule: str, length: int) -> list[str]:
    """The lines to print.

    config: the model's; dtype: the type that activations are stored in; rule: --positions; length:
    of the longest samples.
    """
    depth = config.num_hidden_layers
    rows: list[tuple[str, ...]] = [COLUMNS]
    letters = config.sizes_with(length)
    for kind in table.kinds:
        width = kind.width(letters)
        module, *others = kind.modules or ("",)
        names = [text.format("K") for text in (kind.name, module)]
        names[0] += _only(kind.layers(depth, table.types), depth) if "{}" in kind.name else ""
        more = ", ".join(name.format("K") for name in (*kind.aliases, *others))
        rows.append((*names, f"{width:,}", f"{width * dtype.itemsize:,}", more))
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"{hook:{sizes[0]}}  {module:{sizes[1]}}  {width:>{sizes[2]}}  {size:>{sizes[3]}}  {more}"
        for hook, module, width, size, more in rows
    ]
    lines.append(f"K is the layer, from 0 to {depth - 1}; bytes are for {dtype}")
    if rule != ALL:
        kept = parse_positions(rule).expected(length)
        lines.append(f"--positions {rule} keeps about {kept:,.0f} of a sample's {length:,} tokens")
    return [line.rstrip() for line in lines]


def _only(layers: Sequence[int], depth: int) -> str:
    """Such as " (K: 3, 7-9)"; nothing for all layers."""
    return "" if len(layers) == depth else f" (K: {ranges(layers)})"
