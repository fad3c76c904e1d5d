"""Hook points: what a kind of hook is, what hooks are called, and which ones a request means.

A hook has one canonical name, TransformerLens's, and may have aliases there and as an input or
output of a Hugging Face module. Which kinds there are is a table of the model family, here
`HookTable`. Nothing in this module computes; the family's hooked model captures the values.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from activation_extraction.common.errors import InputError, near_miss

HEAD_SIZES = "HCZ"  # letters
ACTIVATION_TYPES = {"residual": "hook_resid_post", "attn": "hook_attn_out", "mlp": "hook_mlp_out"}


@dataclass(frozen=True)
class HookKind:
    """One row of a hook table.

    name: the canonical one, aliases: other ones of TransformerLens, modules: inputs and outputs of
    Hugging Face modules; "{}" stands for the layer, and without it the kind exists once in a model.
    letters: the axes of one token's value, as in the model file, and S for the tokens of a row;
    their sizes give the width. Kinds with S are large, and have to be asked for by name.
    value: the intermediate of a layer that is captured. at_end: of a kind that exists once, whether
    it belongs to the last layer; else it belongs to the first. types: words of the configuration's
    layer_types; the layers that one of them describes have it, and all layers if there are none.
    """

    name: str
    letters: str
    value: str
    modules: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    at_end: bool = False
    types: tuple[str, ...] = ()

    def width(self, sizes: Mapping[str, int]) -> int:
        """Numbers per token. sizes: letter -> size, from the model's configuration."""
        return math.prod(sizes[letter] for letter in self.letters)

    def exists_in(self, type_: str) -> bool:
        """Whether layers of this type have it."""
        return not self.types or not {*self.types}.isdisjoint(type_.split())

    @property
    def grows(self) -> bool:
        """Whether the width grows with the row."""
        return "S" in self.letters

    def layers(self, depth: int, types: Sequence[str] = ()) -> Sequence[int]:
        """The layers of a model that have a hook of this kind. types: of each layer."""
        if "{}" in self.name:
            return [k for k in range(depth) if not types or self.exists_in(types[k])]
        return range(depth - 1, depth) if self.at_end else range(1)


class Hook(NamedTuple):
    """A kind of hook at one layer. Hooks sort in the order in which the model computes them."""

    layer: int
    order: int  # of the kind within a layer: its index in the family's table
    kind: HookKind

    @property
    def name(self) -> str:
        """The canonical name."""
        return self.kind.name.format(self.layer)

    @property
    def module(self) -> str | None:
        """The Hugging Face module's input or output, None where no module has it."""
        return self.kind.modules[0].format(self.layer) if self.kind.modules else None

    def matching(self, pattern: str) -> list[str]:
        """Its names that a glob matches; none for a large kind whose own name the glob lacks."""
        if self.kind.grows and pattern.rpartition(".")[2] != self.name.rpartition(".")[2]:
            return []
        return [name for name in self.names() if fnmatchcase(name, pattern)]

    def names(self) -> Iterator[str]:
        """Every name, the canonical one first."""
        for name in (self.kind.name, *self.kind.aliases, *self.kind.modules):
            yield name.format(self.layer)

    def facts(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        """What metadata.json says of it beside its canonical name."""
        found: dict[str, Any] = {"module": self.module, "aliases": [*self.names()][1:]}
        found["width"] = self.kind.width(sizes)
        heads, size = self.kind.letters[:-1], self.kind.letters[-1]
        if size in HEAD_SIZES:
            found |= {"heads": math.prod(sizes[axis] for axis in heads), "head_size": sizes[size]}
        if self.kind.grows:
            found |= {"heads": sizes[self.kind.letters[0]], "keys": sizes["S"]}
        return found


@dataclass(frozen=True)
class HookTable:
    """The kinds of hooks of a model family, in the order in which a layer computes them.

    types: of each layer of a model, where that decides which kinds the layer has.
    """

    kinds: tuple[HookKind, ...]
    types: tuple[str, ...] = ()

    def after(self, name: str, *kinds: HookKind) -> "HookTable":
        """This table with more kinds, which are computed right after the kind of this name."""
        at = [kind.name for kind in self.kinds].index(name) + 1
        return replace(self, kinds=(*self.kinds[:at], *kinds, *self.kinds[at:]))

    def of(self, types: Sequence[str]) -> "HookTable":
        """The hooks of a model with layers of these types."""
        kinds = [kind for kind in self.kinds if any(map(kind.exists_in, types))]
        return HookTable(tuple(kinds), tuple(types))

    def every(self, depth: int, growing: bool = False) -> list[Hook]:
        """All hooks of a model with `depth` layers, in their order.

        growing: also those that have to be asked for by name.
        """
        return sorted(
            Hook(layer, order, kind)
            for order, kind in enumerate(self.kinds)
            for layer in kind.layers(depth, self.types)
            if growing or not kind.grows
        )

    def of_layers(self, layers: Sequence[int], activation_type: str, depth: int) -> list[Hook]:
        """One hook per layer. Raises InputError for a layer outside 0 .. depth - 1."""
        for layer in layers:
            if not 0 <= layer < depth:
                raise InputError(
                    f"--layers_to_extract {layer}: the model has layers 0 to {depth - 1}"
                )
        wanted = [f"blocks.{layer}.{ACTIVATION_TYPES[activation_type]}" for layer in layers]
        return list(self.matching(wanted, depth).values())

    def matching(self, patterns: Sequence[str], depth: int) -> dict[str, Hook]:
        """The hooks that any glob matches, each by the name that was asked for, in their order.

        A glob that matches several names of a hook asks for the canonical one, or else for the
        first of them. Raises InputError for a glob that matches nothing.
        """
        asked: dict[Hook, str] = {}
        for pattern in patterns:
            found = {
                hook: names[0]
                for hook in self.every(depth, growing=True)
                if (names := hook.matching(pattern))
            }
            if not found:
                raise self._nothing(pattern, depth)
            asked = found | asked
        return {asked[hook]: hook for hook in sorted(asked)}

    def _nothing(self, pattern: str, depth: int) -> InputError:
        """For a glob that matches nothing."""
        elsewhere = HookTable(self.kinds).every(depth, growing=True)
        for hook in elsewhere:
            if hook.matching(pattern):
                return InputError(
                    f"--hook_names {pattern}: layer {hook.layer} is of type "
                    f"{self.types[hook.layer]} and has no such hook; --list_hooks shows their names"
                )
        known = [name for hook in self.every(depth, growing=True) for name in hook.names()]
        return InputError(
            f"--hook_names {pattern}: matches no hook of a model with layers 0 to "
            f"{depth - 1}{near_miss(pattern, known)}; --list_hooks shows their names"
        )
