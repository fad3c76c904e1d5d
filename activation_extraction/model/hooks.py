"""Hook points: what a kind of hook is, what hooks are called, and which ones a request means.

Names are TransformerLens's. Which kinds there are is a table of the model family, here `HookTable`.
Nothing in this module computes; the family's hooked model captures the values.
"""

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from activation_extraction.cli.errors import InputError

ACTIVATION_TYPES = {"residual": "hook_resid_post", "attn": "hook_attn_out", "mlp": "hook_mlp_out"}


@dataclass(frozen=True)
class HookKind:
    """One row of a hook table.

    name: what follows `blocks.k.`; letters: the axes of one token's value, as in the model file:
    their sizes give the width; value: the intermediate of a layer that the hook captures.
    """

    name: str
    letters: str
    value: str

    def width(self, sizes: Mapping[str, int]) -> int:
        """Numbers per token. sizes: letter -> size, from the model's configuration."""
        return math.prod(sizes[letter] for letter in self.letters)


class Hook(NamedTuple):
    """A kind of hook at one layer. Hooks sort in the order in which the model computes them."""

    layer: int
    order: int  # of the kind within a layer: its index in the family's table
    kind: HookKind

    @property
    def name(self) -> str:
        return f"blocks.{self.layer}.{self.kind.name}"


@dataclass(frozen=True)
class HookTable:
    """The kinds of hooks of a model family, in the order in which a layer computes them."""

    kinds: tuple[HookKind, ...]

    def hook(self, layer: int, name: str) -> Hook:
        """The hook of the kind with this name at a layer."""
        order = [kind.name for kind in self.kinds].index(name)
        return Hook(layer, order, self.kinds[order])

    def every(self, depth: int) -> list[Hook]:
        """All hooks of a model with `depth` layers, in their order."""
        return [
            Hook(layer, order, kind)
            for layer in range(depth)
            for order, kind in enumerate(self.kinds)
        ]

    def of_layers(self, layers: Sequence[int], activation_type: str, depth: int) -> list[Hook]:
        """One hook per layer. Raises InputError for a layer outside 0 .. depth - 1."""
        for layer in layers:
            if not 0 <= layer < depth:
                raise InputError(
                    f"--layers_to_extract {layer}: the model has layers 0 to {depth - 1}"
                )
        return [
            self.hook(layer, ACTIVATION_TYPES[activation_type]) for layer in sorted(set(layers))
        ]

    def matching(self, patterns: Sequence[str], depth: int) -> list[Hook]:
        """The hooks whose names match any glob. Raises InputError for a glob that matches none."""
        matched: set[Hook] = set()
        for pattern in patterns:
            found = [h for h in self.every(depth) if fnmatch.fnmatchcase(h.name, pattern)]
            if not found:
                known = ", ".join(f"blocks.<layer>.{kind.name}" for kind in self.kinds)
                raise InputError(
                    f"--hook_names {pattern}: matches no hook; there are {known} "
                    f"for layers 0 to {depth - 1}"
                )
            matched.update(found)
        return sorted(matched)
