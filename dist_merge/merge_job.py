"""What inspection found, put together: everything the plan is made from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from .adapters.keys import AdapterNames, check_adapter
from .adapters.settings import AdapterSettings, choose_settings, find_settings
from .architectures import find_architecture
from .base_reader import list_base_shards
from .group import Group
from .inspect_sources import OpenSources, inspect_sources
from .layouts import LAYOUTS
from .plan import make_adapter_plan, make_plan
from .records import BaseModel, MergePlan
from .request import ModelMergerConfig


@dataclass
class Job:
    """Checkpoint, base and adapter of one run."""

    config: ModelMergerConfig
    sources: OpenSources
    base: BaseModel | None
    names: AdapterNames
    settings: AdapterSettings | None

    @property
    def is_adapter_alone(self) -> bool:
        """Whether only an adapter folder is published."""
        return self.names.is_lora_only and not self.config.fuse_lora

    @property
    def reads_base(self) -> bool:
        """Whether the base's own weights are sources: an adapter alone is folded into them."""
        return self.names.is_lora_only and self.config.fuse_lora

    @property
    def hashes_base(self) -> bool:
        """Whether the base's replaced weights are read for the manifest."""
        return self.config.compare_base or self.reads_base

    @property
    def copied_nbytes(self) -> int:
        """Upper bound of the bytes copied from the base."""
        if self.base is None or self.is_adapter_alone:
            return 0
        return sum(file.nbytes for file in self.base.files)

    def make_plan(self) -> MergePlan:
        """Make the plan; pure, the same on every rank."""
        inventory = self.sources.inventory
        if self.is_adapter_alone:
            return make_adapter_plan(
                inventory, base=self.base, config=self.config, settings=self.settings
            )
        assert self.base is not None
        if self.reads_base:
            shards = (*inventory.shards, *list_base_shards(self.base))
            inventory = replace(inventory, shards=shards)
        architecture = find_architecture(self.base.transformer_class)
        architecture.check_base(self.base)
        return make_plan(
            inventory,
            base=self.base,
            architecture=architecture,
            layout=LAYOUTS[self.config.output_format],
            config=self.config,
            settings=self.settings,
        )


@dataclass(frozen=True)
class MergedShards:
    """Rank 0: written files (path -> SHA256, size), remarks, and counts of a fold."""

    files: Mapping[str, tuple[str, int]]
    notes: tuple[str, ...]
    fold_counts: Mapping[str, int]


class Input(Protocol):
    """Where the trained tensors come from: files, or a live model."""

    def open(self, group: Group) -> OpenSources:
        """Open and describe what this rank holds. Ranks: collective."""

    def find_settings(
        self, names: AdapterNames, sources: OpenSources, group: Group
    ) -> list[tuple[str, Mapping[str, Any]]]:
        """What is recorded of the adapter's strength, the strongest first. Ranks: collective."""


@dataclass(frozen=True)
class FileInput:
    """A sharded checkpoint in files."""

    config: ModelMergerConfig

    def open(self, group: Group) -> OpenSources:
        """See `Input`."""
        return inspect_sources(self.config, group=group)

    def find_settings(
        self, names: AdapterNames, sources: OpenSources, group: Group
    ) -> list[tuple[str, Mapping[str, Any]]]:
        """See `Input`; the files may lie on any rank's machine, the user's own on rank 0's."""
        stated = self.config.lora_config

        def read() -> bytes:
            assert sources.local_dir is not None
            places = find_settings(
                sources.local_dir,
                adapter=self.config.adapter_name,
                lora_config=Path(stated) if stated is not None and group.rank == 0 else None,
            )
            return json.dumps(places).encode()

        payloads = group.exchange("adapter-settings", group.prepare("read-settings", read))
        places: list[tuple[str, Mapping[str, Any]]] = []
        for payload in payloads:
            places += [(p, data) for p, data in json.loads(payload) if (p, data) not in places]
        return places


def inspect_adapter(
    config: ModelMergerConfig,
    names: AdapterNames,
    *,
    source: Input,
    sources: OpenSources,
    group: Group,
) -> AdapterSettings | None:
    """Find the strength of the chosen adapter; None where there is no adapter.

    Raises:
        PlanError: There is no such adapter, or nothing certain says how strong it is.

    Ranks: collective.
    """
    if not names.adapters and not config.fuse_lora:
        return None
    adapter = config.adapter_name
    group.prepare("check-adapter-name", lambda: check_adapter(names, adapter), is_shared=True)
    places = source.find_settings(names, sources, group)
    return group.prepare(
        "choose-adapter-settings",
        lambda: choose_settings(places, adapter=adapter, adapters=names.adapters),
        is_shared=True,
    )
