"""What a run would take on a machine that is not rented yet: the plan of --plan.

mesh_plan.py says what each mesh takes, data_size.py how much data there is, and rented.py what a
machine costs. make_plan.py makes a plan, and plan_view.py and plan_picture.py show it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from activation_extraction.cli.flags import Config
from activation_extraction.run.data_size import DataSize
from activation_extraction.run.mesh_plan import BINDS, FILLED, Machine, MeshPlan, Range
from activation_extraction.run.rented import PRICES_OF, STORAGE_PRICE, Price

HOUR, TERABYTE = 3600, 1e12


@dataclass(frozen=True)
class Plan:
    """A plan says what a run would take.

    meshes: the best one first; chosen: the one that the run would take. hook_bytes: the bytes that
    each hook stores of a token that is kept, before compression; encoded: encoding -> the bytes
    that all hooks would store of it. price: of one chip. layers: how many run,
    and how many there are.
    """

    config: Config
    machine: Machine
    meshes: Sequence[MeshPlan]
    chosen: MeshPlan
    data: DataSize
    hook_bytes: Sequence[int]
    encoded: Mapping[str, int]
    flops_per_token: float
    price: Price
    layers: tuple[int, int]

    @property
    def best(self) -> MeshPlan | None:
        """Returns the fastest mesh that fits; None if none does."""
        return self.meshes[0] if self.meshes[0].fits else None

    @property
    def bytes_per_token(self) -> float:
        """Returns the bytes that are stored per token of the data, before compression."""
        return self.data.kept * sum(self.hook_bytes)

    @cached_property
    def hours(self) -> Range | None:
        """Returns the hours that the run computes and stores, at best and at worst."""
        if self.data.tokens is None or self.best is None:
            return None
        (least, most), (slow, fast) = self.data.tokens, self.best.tokens_per_second
        return least / fast / HOUR, most / slow / HOUR

    def dollars(self, price: Range | None) -> Range | None:
        """Returns what those hours cost, at best and at worst. price: of one chip for an hour."""
        if price is None or self.hours is None:
            return None
        low, high = (a * b * self.machine.chips for a, b in zip(self.hours, price, strict=True))
        return low, high

    def terabytes(self, token_bytes: float) -> float | None:
        """Returns how many terabytes are stored at most, before compression.

        token_bytes: the bytes that are stored of a token that is kept.
        """
        if self.data.tokens is None:
            return None
        return self.data.tokens[1] * self.data.kept * token_bytes / TERABYTE

    @property
    def shards(self) -> int | None:
        """Returns how many shards all hosts store at most."""
        stored = self.terabytes(sum(self.hook_bytes))
        if stored is None:
            return None
        of_host = 1e3 * stored / self.config.shard_size_gb / self.machine.hosts
        return self.machine.hosts * math.ceil(of_host)

    @property
    def assumptions(self) -> list[str]:
        """Returns the assumptions behind the numbers, a line each."""
        config, machine = self.config, self.machine
        shares = ", ".join(
            f"{BINDS[name]} {low:.0%} to {high:.0%}" for name, (low, high) in machine.shares.items()
        )
        source = "measured on this machine" if machine.measured else "from data sheets"
        pack = machine.pack.bytes_per_second / 1e9
        found = [
            f"no step has run: its times are operations and bytes divided by speeds {source}",
            f"a run reaches these shares of the speeds: {shares}",
            f"one core of a host packs {pack:.2f} GB/s, as one of this machine does; files have "
            f"{machine.pack.ratio:.2f} times the bytes of the activations",
            f"padding is {1 - FILLED:.0%} of a batch's tokens; the time to start and to load the "
            "model is left out",
        ]
        unknown = {"host": machine.host.cores, "copy": machine.host.bus}
        if config.upload_to_gcs:
            unknown["upload"] = machine.host.network
        else:
            found.append("the disk of --output_dir is fast enough; nothing is uploaded")
        left_out = ", ".join(BINDS[name] for name, value in unknown.items() if value is None)
        if left_out and not machine.on_cpu:
            found.append(f"no source says how fast these are, so the plan ignores them: {left_out}")
        if self.data.tokens is not None:
            found.append(f"{self.data.tokens[1]:,.0f} tokens at most: {self.data.why}")
        if config.roles or config.mask_column or config.drop_token_ids:
            found.append("no token is dropped by --roles, --mask_column or --drop_token_ids")
        if any(mesh.step.by_formula for mesh in self.meshes):
            found.append("what the memory moves, and what devices send, is by formula")
        if machine.devices[0].platform == "gpu":
            found.append("JAX takes three quarters of a GPU's memory, as it does by default")
        if config.total_machines > 1:
            found.append(
                f"this is one machine of {config.total_machines}: all together take as many times "
                "the dollars and terabytes"
            )
        given = config.chip_hour_dollars is not None
        prices = "prices of storage" if given or self.price.on_demand is None else "prices"
        found.append(f"{prices} are those of Google Cloud in the USA, as of {PRICES_OF}")
        return found

    def to_keep(self) -> dict[str, Any] | None:
        """Returns what the run will show beside its real speed; None if its mesh does not fit.

        Tokens per second are of tokens that are kept, as in the summary of a run.
        """
        if not self.chosen.fits:
            return None
        return {
            "machine": self.machine.name,
            "mesh": self.chosen.layout.shape,
            "tokens_per_second": [self.data.kept * x for x in self.chosen.tokens_per_second],
            "bound_by": BINDS[self.chosen.binds],
        }

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as --json prints it."""
        token_bytes = sum(self.hook_bytes)
        stored = self.terabytes(token_bytes)
        dollars = {name: self.dollars(price) for name, price in self.price._asdict().items()}
        return {
            "estimate": True,
            "machine": self.machine.name,
            "hosts": self.machine.hosts,
            "chips": self.machine.chips,
            "model": "the demo's" if self.config.demo else self.config.model_path,
            "rows_per_host": self.chosen.rows,
            "flops_per_token": self.flops_per_token,
            "bytes_per_token": self.bytes_per_token,
            "meshes": [mesh.to_json() for mesh in self.meshes],
            "best": None if self.best is None else self.best.to_json(),
            "chosen": self.chosen.to_json(),
            "tokens": self.data.tokens,
            "hours": self.hours,
            "dollars": None if self.hours is None else dollars,
            "chip_hour_dollars": self.price._asdict(),
            "terabytes": stored,
            "shards": self.shards,
            "storage_dollars_per_month": stored and [1e3 * stored * x for x in STORAGE_PRICE],
            "savings": {
                "terabytes_per_hook": self.terabytes(token_bytes / len(self.hook_bytes)),
                **{name: self.terabytes(token_bytes - n) for name, n in self.encoded.items()},
            },
            "assumptions": self.assumptions,
        }
