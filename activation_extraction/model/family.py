"""What the tool knows of a family of models: one object, handed in by the script.

So this room computes with a family's modules without importing the files that define them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import flax.linen as nn

from activation_extraction.model.hooks import Hook, HookTable
from activation_extraction.model.mesh import Layout
from activation_extraction.model.weights import WeightSpec

WeightTable = dict[tuple[str, ...], WeightSpec]


class HookedModel(Protocol):
    """A model that returns what its hooks saw: {width: (hooks of that width, B, T, width)}.

    The hooks of one width are in the order of `hooks`. `apply` takes the parameters, then token
    ids, segment ids and positions, all (B, T) int32.
    """

    config: Any
    hooks: tuple[Hook, ...]
    dtype: Any
    activation_dtype: Any
    layout: Layout
    stages: int
    apply: Callable[..., Any]
    clone: Callable[..., "HookedModel"]

    @property
    def num_layers(self) -> int: ...

    def micro_batches(self, rows: int) -> int: ...

    def flops(self, lengths: Sequence[int]) -> float: ...


@dataclass(frozen=True)
class ModelFamily:
    """One family of models.

    config: the class of its configurations, with `from_file` and `from_hf`, both of which check;
    whole: configuration -> the complete language model; hooked: (configuration, hooks, dtype,
    activation dtype, attention, layout) -> the HookedModel that computes these hooks and no more;
    weight_table: either model -> its parameters; hooks: the kinds of hooks that it has.
    """

    config: Any
    whole: Callable[[Any], nn.Module]
    hooked: Callable[..., Any]
    weight_table: Callable[[Any], WeightTable]
    hooks: HookTable

    def weights_of(self, raw: Mapping[str, Any]) -> Iterable[WeightSpec]:
        """All weights of the model with this config.json."""
        return self.weight_table(self.whole(self.config.from_hf(raw))).values()
