"""--list_hooks: the hooks of a model under all their names, and how much each one stores.

The names are the hook table's; this module only lays them out.
"""

from typing import Any

from activation_extraction.model.hooks import HookTable

COLUMNS = "hook", "Hugging Face module", "width", "bytes/token", "other names"


def list_hooks(table: HookTable, config: Any, dtype: Any) -> list[str]:
    """Lines of text. config: of the model; dtype: in which activations are stored."""
    rows: list[tuple[str, ...]] = [COLUMNS]
    for kind in table.kinds:
        width = kind.width(config.sizes)
        module, *others = kind.modules or ("",)
        names = (text.format("K") for text in (kind.name, module))
        more = ", ".join(name.format("K") for name in (*kind.aliases, *others))
        rows.append((*names, f"{width:,}", f"{width * dtype.itemsize:,}", more))
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"{hook:{sizes[0]}}  {module:{sizes[1]}}  {width:>{sizes[2]}}  {size:>{sizes[3]}}  {more}"
        for hook, module, width, size, more in rows
    ]
    last = config.num_hidden_layers - 1
    return [
        *map(str.rstrip, lines),
        f"K is the layer, from 0 to {last}; bytes are those of {dtype}",
    ]
